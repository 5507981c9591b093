"""Lowering rules of equations on what is sharded: what is elementwise, moves whole dims, or sums runs on parts.

Anything else gets the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.mesh import Layout, axes_of, part_type
from plait.core_ir.ops import collective
from plait.frontends.jax import lower_elementwise
from plait.frontends.jax.jaxpr import JaxprEqn, shape_of
from plait.frontends.jax.sharded import (
    Operand,
    Sharded,
    broadcast_layout,
    broadcasts,
    sharded,
    together,
    trimmed,
)
from plait.frontends.jax.site import Rule, Site, ints

SUM = "reduce_sum"
MOVES = frozenset({"transpose", "broadcast_in_dim", "squeeze", "reshape"})
"""Primitives each dim of whose result is a dim of the operand, or new; `reshape` where it adds or drops dims of one."""


def on_parts(b: Builder, site: Site, rule: Rule, operands: Sequence[Operand]) -> Operand | None:
    """What an equation, some operands of which are sharded, gives on their parts; None where it needs the whole."""
    name = site.eqn.primitive.name
    if name in lower_elementwise.RULES:
        return _elementwise(b, site, rule, operands)
    (x,) = operands if name == SUM or name in MOVES else (None,)
    if not isinstance(x, Sharded):
        return None
    return _sum(b, site, rule, x) if name == SUM else _moved(b, site, rule, x)


def moved_dims(eqn: JaxprEqn) -> list[int | None]:
    """For each dim of the result of one of `MOVES` which of the operand it is, None for a new one; all are new where a
    reshape does more than adding or dropping dims of one.
    """
    p, old, new = eqn.params, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    match eqn.primitive.name:
        case "transpose":
            return list(ints(p["permutation"]))
        case "broadcast_in_dim":
            dims = ints(p["broadcast_dimensions"])
            return [dims.index(d) if d in dims else None for d in range(len(new))]
    kept = [d for d, size in enumerate(old) if size != 1]
    if [old[d] for d in kept] != [size for size in new if size != 1]:
        return [None] * len(new)
    rest = iter(kept)
    return [None if size == 1 else next(rest) for size in new]


def _elementwise(b: Builder, site: Site, rule: Rule, operands: Sequence[Operand]) -> Operand | None:
    shape = site.result.shape
    full = [x for x in operands if isinstance(x, Sharded) and x.type.shape == shape]
    if not full or not all(broadcasts(x.type.shape, shape) for x in operands):
        return None
    finest = max(full, key=lambda x: len(axes_of(x.layout)))
    layout, axes = finest.layout, finest.axes
    parts = [
        site.lowering.laid_out(b, x, broadcast_layout(layout, x.type.shape, shape))
        for x in operands
    ]
    return sharded(_local(b, site, rule, parts, layout, axes), layout, site.result, axes)


def _moved(b: Builder, site: Site, rule: Rule, x: Sharded) -> Operand | None:
    dims = moved_dims(site.eqn)
    if not {d for d, over in enumerate(x.layout) if over} <= {*dims}:
        return None
    layout = trimmed(x.layout[d] if d is not None and d < len(x.layout) else () for d in dims)
    return sharded(_local(b, site, rule, [x.local], layout, x.axes), layout, site.result, x.axes)


def _sum(b: Builder, site: Site, rule: Rule, x: Sharded) -> Operand:
    """The sum of parts along dims that are cut is summed over the ranks."""
    dims = set(ints(site.params["axes"]))
    kept = trimmed(over for dim, over in enumerate(x.layout) if dim not in dims)
    total = _local(b, site, rule, [x.local], kept, x.axes)
    for axis in (axis for dim in sorted(dims & {*range(len(x.layout))}) for axis in x.layout[dim]):
        total = together(
            b, collective.all_reduce, total, axis=axis, size=x.axes[axis], reduction="sum"
        )
    return sharded(total, kept, site.result, x.axes)


def _local(
    b: Builder,
    site: Site,
    rule: Rule,
    parts: Sequence[Value],
    layout: Layout,
    axes: Mapping[str, int],
) -> Value:
    """The result of an equation on parts."""
    type = part_type(site.result, layout, axes)
    local = rule(b, replace(site, results=(type,)), *parts)
    assert isinstance(local, Value)
    return local
