"""Meshes of ranks: axes by name, where a rank stands on them, and how arrays lie over them.

Ranks stand in a mesh in row-major order: along the last axis they are next to each other. Along one axis stand the
stages. What the others are for is known by properties; an axis may have both of the first two, one, or none:

- a *data axis* cuts each microbatch: ranks along it run parts of their own, and what they give is added up;
- a *named axis* is named by the program, in collectives or in the layouts of its parameters;
- an *auto axis* is neither: types are whole along it, and the backend's compiler partitions what it likes over it, as
  annotations of the program and placements of its parameters ask.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from plait.core_ir.errors import UsageError
from plait.core_ir.types import TensorType

Layout: TypeAlias = tuple[tuple[str, ...], ...]
"""How a whole array is cut: for each dim the axes that cut it, the outermost first, none along a dim that is whole.
Dims at the end that are whole may be left out; so `()` is an array that is whole on every rank."""

Place: TypeAlias = Mapping[str, int]
"""A rank's number along each axis."""


@dataclass(frozen=True)
class Mesh:
    """Axes with their sizes, in order, and what they are for.

    partial_grads: parameters whose gradients, as a program gives them, are still to be summed over other axes than
    those of data, and these axes.
    placements: how parameters lie over auto axes.
    shard_axis: the axis over which parameters are sharded by a pass: how they are held along it says nothing else.
    """

    axes: Mapping[str, int]
    stage_axis: str = "stage"
    data_axes: tuple[str, ...] = ()
    named_axes: tuple[str, ...] = ()
    partial_grads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    auto_axes: tuple[str, ...] = ()
    placements: Mapping[str, Layout] = field(default_factory=dict)
    shard_axis: str | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return math.prod(self.axes.values())

    @property
    def num_parts(self) -> int:
        """Into how many parts a microbatch is cut."""
        return math.prod(self.axes[axis] for axis in self.data_axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The data axes that the program does not name: ranks along them run it side by side."""
        return tuple(axis for axis in self.data_axes if axis not in self.named_axes)

    @cached_property
    def other_axes(self) -> tuple[str, ...]:
        """All axes but that of the stages, in the mesh's order."""
        return tuple(axis for axis in self.axes if axis != self.stage_axis)

    @cached_property
    def manual_axes(self) -> tuple[str, ...]:
        """The other axes but for auto ones: ranks along them are told what to do each."""
        return tuple(axis for axis in self.other_axes if axis not in self.auto_axes)

    def places(self) -> Iterator[dict[str, int]]:
        """Where each rank stands, from rank 0 on."""
        for numbers in product(*(range(size) for size in self.axes.values())):
            yield dict(zip(self.axes, numbers, strict=True))

    def place(self, rank: int) -> dict[str, int]:
        """Where one rank stands."""
        numbers: dict[str, int] = {}
        for axis, size in reversed(list(self.axes.items())):
            rank, numbers[axis] = divmod(rank, size)
        return {axis: numbers[axis] for axis in self.axes}

    def rank(self, place: Place) -> int:
        """Who stands there."""
        number = 0
        for axis, size in self.axes.items():
            number = number * size + place[axis]
        return number

    def groups(self, axes: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ along these axes alone, each rank in one group; groups and ranks in order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self.places()):
            key = tuple(number for axis, number in place.items() if axis not in axes)
            found.setdefault(key, []).append(rank)
        return tuple(map(tuple, found.values()))

    def axes_between_nodes(self, ranks_per_node: int) -> tuple[str, ...]:
        """The axes along which ranks of one group are on several nodes, which ranks fill in their order."""
        return tuple(
            axis
            for axis in self.axes
            if any(len({rank // ranks_per_node for rank in g}) > 1 for g in self.groups((axis,)))
        )

    def part(self, rank: int) -> int:
        """The number of the part of every microbatch that a rank runs."""
        place, number = self.place(rank), 0
        for axis in self.axes:
            if axis in self.data_axes:
                number = number * self.axes[axis] + place[axis]
        return number

    def summed_axes(self, param: str, layout: Layout) -> tuple[str, ...]:
        """The axes over which the gradient of a parameter is added up: data axes that do not cut the parameter, and
        those of which the program leaves it a partial sum."""
        summed = {*self.partial_grads.get(param, ()), *self.data_axes}
        return tuple(a for a in self.other_axes if a in summed and a not in axes_of(layout))

    @property
    def sums_gradients(self) -> bool:
        """Whether any gradient is added up over ranks."""
        return self.num_parts > 1 or bool(self.partial_grads)


def axes_of(layout: Layout) -> tuple[str, ...]:
    """The axes that cut an array."""
    return tuple(axis for axes in layout for axis in axes)


def part_type(type: TensorType, layout: Layout, axes: Mapping[str, int]) -> TensorType:
    """The type of a rank's part of a whole array. UsageError where an axis does not divide its dim."""
    shape = list(type.shape)
    for dim, over in enumerate(layout):
        count = math.prod(axes[axis] for axis in over)
        if dim >= len(shape) and count > 1:
            raise UsageError(f"{type} has no dim {dim} to cut over {', '.join(over)}")
        if count > 1:
            if shape[dim] % count:
                raise UsageError(
                    f"dim {dim} of {type} is cut over {', '.join(over)}, which does not divide: {shape[dim]} by {count}"
                )
            shape[dim] //= count
    return type.with_shape(shape)


def whole_type(type: TensorType, layout: Layout, axes: Mapping[str, int]) -> TensorType:
    """The type of the whole array of which each rank holds a part of that type."""
    counts = [math.prod(axes[axis] for axis in over) for over in layout]
    counts += [1] * (type.rank - len(counts))
    return type.with_shape(n * count for n, count in zip(type.shape, counts, strict=True))


def part_of(array: Any, layout: Layout, axes: Mapping[str, int], place: Place) -> Any:
    """A rank's part of a whole array of any kind that can be sliced."""
    if not axes_of(layout):
        return array
    slices = []
    for dim, over in enumerate(layout):
        number, count = 0, 1
        for axis in over:
            number, count = number * axes[axis] + place[axis], count * axes[axis]
        length = array.shape[dim] // count
        slices.append(slice(number * length, (number + 1) * length))
    return array[tuple(slices)]
