"""Lowering rule of `shard_map`: its body on the parts of its operands, inlined."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.frontends.jax.mapped import SHARD_MAP, Mapped, mapped
from plait.frontends.jax.sharded import WHOLE, Operand, sharded
from plait.frontends.jax.site import Rule, Site


def _shard_map(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    m = mapped(site.params, site.source)
    _check(m, site)
    inner = site.lowering
    inner.axes.update(m.axes)
    parts = [inner.laid_out(b, x, to) for x, to in zip(operands, m.operands, strict=True)]
    results = inner.inline(b, m.body, *parts)
    return [
        sharded(inner.laid_out(b, x, WHOLE), layout, type, m.axes)
        for x, layout, type in zip(results, m.results, site.results, strict=True)
    ]


def _check(m: Mapped, site: Site) -> None:
    known, stage_axis = site.lowering.axes, site.lowering.stage_axis
    for axis, size in m.axes.items():
        if known.get(axis, size) != size:
            raise CaptureError(
                f"{site.source}: shard_map over a mesh with {size} ranks along axis {axis!r}; elsewhere there are "
                f"{known[axis]}; give mesh= and the model's meshes the same sizes"
            )
    for axis in m.auto:
        if axis != stage_axis:
            site.lowering.marks.left.setdefault(axis, f"{site.source}: shard_map")


RULES: Mapping[str, Rule] = MappingProxyType({SHARD_MAP: _shard_map})
