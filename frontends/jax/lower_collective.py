"""Lowering rules: collectives over mesh axes, each a start with its wait behind it; casts of what varies over an axis.

Sizes of axes are those of the lowering. Several axes at once are one after the other. Over axes of `vmap`, which are
dims by now, reductions are local.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.core_ir.ops import reduce
from plait.frontends.jax.sharded import together
from plait.frontends.jax.site import Rule, Site, ints, pairs


def _axes(site: Site, name: str = "axis_name") -> list[dict[str, Any]]:
    """Axis and size, as attributes, for each mesh axis of an equation."""
    named = site.params[name]
    named = named if isinstance(named, tuple) else (named,)
    primitive = site.eqn.primitive.name
    if site.params.get("axis_index_groups") is not None:
        raise CaptureError(
            f"{site.source}: {primitive} with axis_index_groups is not captured; make the groups an axis of the mesh"
        )
    known = site.lowering.axes
    for axis in named:
        if axis not in known and not isinstance(axis, int):
            raise CaptureError(
                f"{site.source}: {primitive}, a collective, is over axis {axis!r}, which the mesh does not have; it "
                f"has {', '.join(map(repr, known)) or 'no axes'}"
            )
    return [{"axis": axis, "size": known[axis]} for axis in named if not isinstance(axis, int)]


def _only_axis(site: Site) -> dict[str, Any]:
    first, *others = _axes(site)
    if others:
        raise CaptureError(
            f"{site.source}: {site.eqn.primitive.name} over several axes at once is not captured; write it over one "
            "axis after the other, or over one axis of a mesh that joins them"
        )
    return first


def _reduction(reduction: str, local: Op) -> Rule:
    def rule(b: Builder, site: Site, *xs: Value) -> Sequence[Value]:
        over = _axes(site, "axes")
        dims = ints([axis for axis in site.params["axes"] if isinstance(axis, int)])
        results = [b(local, x, dims=dims) if dims else x for x in xs]
        for attrs in over:
            results = [
                together(b, ops.all_reduce, x, reduction=reduction, **attrs) for x in results
            ]
        return results

    return rule


def _all_gather(b: Builder, site: Site, x: Value) -> Value:
    """Over several axes the last varies fastest, and so is gathered first."""
    dim = int(site.params["all_gather_dimension"])
    if not site.params["tiled"]:
        x = b.reshape(x, (*x.type.shape[:dim], 1, *x.type.shape[dim:]))
    for attrs in reversed(_axes(site)):
        x = together(b, ops.all_gather, x, dim=dim, **attrs)
    return x


def _reduce_scatter(b: Builder, site: Site, x: Value) -> Value:
    dim = int(site.params["scatter_dimension"])
    for attrs in _axes(site):
        x = together(b, ops.reduce_scatter, x, dim=dim, reduction="sum", **attrs)
    return b.reshape(x, site.result.shape)


def _all_to_all(b: Builder, site: Site, x: Value) -> Value:
    dims = {
        "split_dim": int(site.params["split_axis"]),
        "concat_dim": int(site.params["concat_axis"]),
    }
    return together(b, ops.all_to_all, x, **dims, **_only_axis(site))


def _ppermute(b: Builder, site: Site, *xs: Value) -> Sequence[Value]:
    moved = {"pairs": pairs(site.params["perm"]), **_only_axis(site)}
    return [together(b, ops.permute, x, **moved) for x in xs]


def _axis_index(b: Builder, site: Site) -> Value:
    return b(ops.axis_index, **_only_axis(site))


def _same(b: Builder, site: Site, *xs: Value) -> Sequence[Value]:
    return xs


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "psum": _reduction("sum", reduce.reduce_sum),
        "psum_invariant": _reduction("sum", reduce.reduce_sum),
        "pmax": _reduction("max", reduce.reduce_max),
        "pmin": _reduction("min", reduce.reduce_min),
        "all_gather": _all_gather,
        "all_gather_invariant": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "ppermute": _ppermute,
        "axis_index": _axis_index,
        "pvary": _same,
    }
)
