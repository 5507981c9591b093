"""Whole arrays of which each rank holds a part, and how parts and wholes are made of each other.

What a `shard_map` gives is kept as the parts it is made of until somebody needs the whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.mesh import Layout, axes_of, part_type
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.core_ir.ops import elementwise
from plait.core_ir.ops.shape import dynamic_slice
from plait.core_ir.types import TensorType, i32

WHOLE: Layout = ()


@dataclass(frozen=True, eq=False)
class Sharded:
    """A whole array by this rank's part of it.

    type: of the whole. axes: the number of ranks along each axis of the layout.
    """

    local: Value
    layout: Layout
    type: TensorType
    axes: Mapping[str, int]


Operand: TypeAlias = Value | Sharded
"""What an equation outside `shard_map` reads and gives."""


def normal(layout: Layout, axes: Mapping[str, int]) -> Layout:
    """The layout without axes of one rank, and without dims at the end that are whole."""
    return trimmed(tuple(axis for axis in over if axes[axis] > 1) for over in layout)


def trimmed(layout: Iterable[tuple[str, ...]]) -> Layout:
    """The layout without dims at the end that are whole."""
    dims = list(layout)
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


def part(x: Operand) -> Value:
    """What this rank holds: its part, or the whole."""
    return x.local if isinstance(x, Sharded) else x


def layout_of(x: Operand) -> Layout:
    """How a value is cut."""
    return x.layout if isinstance(x, Sharded) else WHOLE


def sharded(local: Value, layout: Layout, type: TensorType, axes: Mapping[str, int]) -> Operand:
    """The whole of that type by its part; the value itself where it is not cut. Layouts are normal ones."""
    if layout == WHOLE:
        return local
    return Sharded(local, layout, type, {axis: axes[axis] for axis in axes_of(layout)})


def like(x: Operand, local: Value) -> Operand:
    """Another value that lies as x does; its dims are those of x."""
    if not isinstance(x, Sharded):
        return local
    return Sharded(local, x.layout, x.type.with_dtype(local.type.dtype), x.axes)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether an array of that shape is spread over another within one equation: a scalar, or along dims of size 1."""
    return not shape or (
        len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True))
    )


def broadcast_layout(layout: Layout, shape: Sequence[int], to: Sequence[int]) -> Layout:
    """How an array lies that is spread over another of that layout: whole along dims that are spread."""
    pairs = zip(layout, shape, to, strict=False)
    return trimmed(over if n == m else () for over, n, m in pairs)


def laid_out(b: Builder, x: Operand, layout: Layout, axes: Mapping[str, int]) -> Value:
    """The part of x by another layout: gathered along what cuts it now and not then, cut by what is new."""
    old, value = layout_of(x), part(x)
    sizes = {**axes, **x.axes} if isinstance(x, Sharded) else axes
    width = max(len(old), len(layout))
    pairs = list(zip(_padded(old, width), _padded(layout, width), strict=True))
    shared = [_num_shared(before, after) for before, after in pairs]
    for dim, (before, _) in enumerate(pairs):
        for axis in reversed(before[shared[dim] :]):
            value = together(b, ops.all_gather, value, dim=dim, axis=axis, size=sizes[axis])
    return _cut(b, value, [after[n:] for n, (_, after) in zip(shared, pairs, strict=True)], sizes)


def together(b: Builder, op: Op, x: Value, **attrs: Any) -> Value:
    """A collective and its wait."""
    return b(ops.wait, b(op, x, **attrs))


def _padded(layout: Layout, width: int) -> Layout:
    return (*layout, *((),) * (width - len(layout)))


def _num_shared(before: Sequence[str], after: Sequence[str]) -> int:
    """How many axes, the outermost first, both have."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))


def _cut(b: Builder, x: Value, layout: Sequence[Sequence[str]], axes: Mapping[str, int]) -> Value:
    if not any(layout):
        return x
    sizes = part_type(x.type, tuple(map(tuple, layout)), axes).shape
    starts = [b.literal(0, i32)] * x.type.rank
    for dim, over in enumerate(layout):
        if over:
            starts[dim] = b(elementwise.mul, _number(b, over, axes), b.literal(sizes[dim], i32))
    return b(dynamic_slice, x, *starts, sizes=sizes)


def _number(b: Builder, over: Sequence[str], axes: Mapping[str, int]) -> Value:
    """The number of this rank's part along one dim."""
    number = None
    for axis in over:
        place = b(ops.axis_index, axis=axis, size=axes[axis])
        if number is None:
            number = place
        else:
            scaled = b(elementwise.mul, number, b.literal(axes[axis], i32))
            number = b(elementwise.add, scaled, place)
    assert number is not None
    return number
