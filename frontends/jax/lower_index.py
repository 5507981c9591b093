"""Lowering rules: gather and the scatters, in all their modes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.op import Literal
from plait.core_ir.ops import elementwise
from plait.core_ir.ops import index as ops
from plait.core_ir.ops.reduce import highest, lowest
from plait.core_ir.types import DType
from plait.frontends.jax.lower_extern import extern
from plait.frontends.jax.site import Rule, Site, ints, key_rank


def _gather(b: Builder, site: Site, x: Value, indices: Value) -> Value:
    p = site.params
    names = p["dimension_numbers"]
    attrs: dict[str, Any] = {
        "offset_dims": ints(names.offset_dims),
        "collapsed_slice_dims": ints(names.collapsed_slice_dims),
        "start_index_map": ints(names.start_index_map),
        "operand_batching_dims": ints(names.operand_batching_dims),
        "start_indices_batching_dims": ints(names.start_indices_batching_dims),
        "slice_sizes": ints(p["slice_sizes"]),
        "mode": "clip",
    }
    if key_rank(site):
        attrs["offset_dims"] = (*attrs["offset_dims"], site.result.rank - 1)
        attrs["slice_sizes"] = (*attrs["slice_sizes"], 2)
    if GatherScatterMode.from_any(p["mode"]) == GatherScatterMode.FILL_OR_DROP:
        content = _fill_value(p["fill_value"], x.type.dtype)
        attrs["mode"], attrs["fill_value"] = "fill", Literal(content)
    return b(ops.gather, x, indices, **attrs)


def _fill_value(given: Any, dtype: DType) -> np.ndarray[Any, Any]:
    """What JAX puts where a slice does not fit: NaN, the least signed or the largest unsigned integer, True."""
    if given is None:
        bound = lowest if dtype.kind == "signed" else highest
        given = np.nan if dtype.is_inexact else bound(dtype)
    return np.asarray(given, dtype.numpy)


def _scatter(kind: str) -> Rule:
    def rule(
        b: Builder, site: Site, x: Value, indices: Value, updates: Value
    ) -> Value | Sequence[Value]:
        p = site.params
        if kind == "set" and p["update_jaxpr"] is not None:
            return extern(b, site, x, indices, updates)
        if site.eqn.primitive.name == "scatter-sub":
            updates = b(elementwise.neg, updates)
        names = p["dimension_numbers"]
        window_dims = ints(names.update_window_dims)
        if key_rank(site):
            window_dims = (*window_dims, updates.type.rank - 1)
        clip = GatherScatterMode.from_any(p["mode"]) == GatherScatterMode.CLIP
        return b(
            ops.scatter,
            x,
            indices,
            updates,
            kind=kind,
            update_window_dims=window_dims,
            inserted_window_dims=ints(names.inserted_window_dims),
            scatter_dims_to_operand_dims=ints(names.scatter_dims_to_operand_dims),
            operand_batching_dims=ints(names.operand_batching_dims),
            scatter_indices_batching_dims=ints(names.scatter_indices_batching_dims),
            mode="clip" if clip else "drop",
        )

    return rule


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "gather": _gather,
        "scatter": _scatter("set"),
        "scatter-add": _scatter("add"),
        "scatter-sub": _scatter("add"),
        "scatter-mul": _scatter("mul"),
        "scatter-min": _scatter("min"),
        "scatter-max": _scatter("max"),
    }
)
