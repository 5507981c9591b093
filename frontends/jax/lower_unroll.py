"""Unrolling a scan that a stage boundary cuts.

What each iteration stacks stays available one by one, so that the backward scan of a stage reads the slices of its own
iterations and not a stack that holds those of all stages. Where the stack itself is needed (the gradient of stacked
parameters) it is a sum of one zero-padded stack for each stage: a partial value in each.
"""

from collections.abc import Sequence
from itertools import groupby

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.mesh import part_type
from plait.core_ir.ops import elementwise
from plait.core_ir.ops import shape as ops
from plait.core_ir.types import TensorType
from plait.frontends.jax.jaxpr import ClosedJaxpr
from plait.frontends.jax.sharded import WHOLE, Operand, Sharded, layout_of, part, sharded
from plait.frontends.jax.site import Site

Part = tuple[int, Operand]
"""A slice that one iteration gave, and how many markers had been met before it was made."""


def unroll_scan(
    b: Builder,
    site: Site,
    body: ClosedJaxpr,
    consts: Sequence[Operand],
    carry: Sequence[Operand],
    xs: Sequence[Operand],
) -> list[Operand]:
    """The results of a scan as equations of its iterations, one after the other. No x is cut along its first dim."""
    length, marks = int(site.params["length"]), site.lowering.marks
    order = range(length - 1, -1, -1) if site.params["reverse"] else range(length)
    carry = list(carry)
    stacks: dict[int, list[Part]] = {}
    for i in order:
        rows = [_row(b, x, marks.slices.get(part(x)), i) for x in xs]
        for row, x in zip(rows, xs, strict=True):
            if part(x) in marks.backward:
                marks.backward.add(part(row))
        results = site.lowering.inline(b, body, *consts, *carry, *rows)
        carry, made = results[: len(carry)], results[len(carry) :]
        for number, value in enumerate(made):
            stacks.setdefault(number, []).append((marks.num_met, value))
    if site.params["reverse"]:
        stacks = {number: parts[::-1] for number, parts in stacks.items()}
    ys = []
    for number, type in enumerate(site.results[len(carry) :]):
        parts = stacks.get(number, [])
        stack = _stack(b, site, parts, type)
        marks.slices[part(stack)] = [value for _, value in parts]
        ys.append(stack)
    return [*carry, *ys]


def _row(b: Builder, x: Operand, slices: Sequence[Operand] | None, index: int) -> Operand:
    if slices is not None:
        return slices[index]
    local, shape = part(x), part(x).type.shape
    start = (index, *(0 for _ in shape[1:]))
    limit = (index + 1, *shape[1:])
    row = b(ops.slice_, local, start=start, limit=limit, strides=(1,) * len(shape))
    row = b.reshape(row, shape[1:])
    if not isinstance(x, Sharded):
        return row
    return Sharded(row, x.layout[1:], x.type.with_shape(x.type.shape[1:]), x.axes)


def _stack(b: Builder, site: Site, parts: Sequence[Part], type: TensorType) -> Operand:
    """The slices as one array, of parts where all are cut in one way."""
    if not parts:
        return b.full(type, 0)
    layouts = {layout_of(value) for _, value in parts}
    layout = layouts.pop() if len(layouts) == 1 else WHOLE
    lowering = site.lowering
    if layout != WHOLE:
        layout = ((), *layout)
    local_type = part_type(type, layout, lowering.axes)
    total, at = None, 0
    for _, group in groupby(parts, key=lambda of: of[0]):
        local = [part(v) if layout != WHOLE else lowering.whole(b, v) for _, v in group]
        rows = [b.reshape(value, (1, *value.type.shape)) for value in local]
        block = rows[0] if len(rows) == 1 else b(ops.concatenate, *rows, dim=0)
        padded = _placed(b, block, at, local_type)
        total = padded if total is None else b(elementwise.add, total, padded)
        at += len(rows)
    assert total is not None
    return sharded(total, layout, type, lowering.axes)


def _placed(b: Builder, block: Value, at: int, type: TensorType) -> Value:
    """A block of rows at its place in an array that is zero elsewhere."""
    if block.type == type:
        return block
    rank = type.rank
    low = tuple(at if d == 0 else 0 for d in range(rank))
    high = tuple(type.shape[0] - at - block.type.shape[0] if d == 0 else 0 for d in range(rank))
    zero = b.literal(0, type.dtype)
    return b(ops.pad, block, zero, low=low, high=high, interior=(0,) * rank)
