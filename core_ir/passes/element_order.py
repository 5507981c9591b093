"""Where the elements of an array that was reshaped and transposed stand in the original."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from plait.core_ir.graph import Eqn
from plait.core_ir.ops.shape import reshape, transpose

Loops = tuple[tuple[int, int], ...]
"""(count, step) of nested loops, the outermost first: in row-major order, the numbers that they run through."""


@dataclass(frozen=True)
class Elements:
    """The elements of an array: its shape, and in row-major order their numbers in the original.

    Loops say the numbers, no two of which can be one; None where they cannot be cut as the dims are.
    """

    shape: tuple[int, ...]
    loops: Loops | None

    def reshaped(self, shape: Sequence[int]) -> "Elements":
        return replace(self, shape=tuple(shape))

    def transposed(self, permutation: Sequence[int]) -> "Elements":
        dims = None if self.loops is None else _by_dims(self.loops, self.shape)
        loops = None if dims is None else _merged(loop for d in permutation for loop in dims[d])
        return Elements(tuple(self.shape[d] for d in permutation), loops)

    def viewed(self, eqn: Eqn) -> "Elements":
        """After a reshape or a transpose."""
        if eqn.op is reshape:
            return self.reshaped(eqn.attrs["shape"])
        assert eqn.op is transpose
        return self.transposed(eqn.attrs["permutation"])

    def cut(self, dim: int, count: int) -> "Elements":
        """With a dim cut into so many parts, whose number becomes the first dim."""
        before, size, behind = self.shape[:dim], self.shape[dim], self.shape[dim + 1 :]
        parts = self.reshaped((*before, count, size // count, *behind))
        return parts.transposed((dim, *(d for d in range(len(parts.shape)) if d != dim)))

    def joined(self, dim: int) -> "Elements":
        """With the first dim as the number of parts that a dim behind it is cut into; undoes `cut`."""
        order = list(range(1, len(self.shape)))
        parts = self.transposed((*order[:dim], 0, *order[dim:]))
        before, both, behind = parts.shape[:dim], parts.shape[dim : dim + 2], parts.shape[dim + 2 :]
        return parts.reshaped((*before, math.prod(both), *behind))


def elements(shape: Sequence[int]) -> Elements:
    """An array as it is."""
    return Elements(tuple(shape), _merged([(math.prod(shape), 1)]))


def _merged(loops: Iterable[tuple[int, int]]) -> Loops:
    """The same numbers by as few loops as there can be."""
    found: list[tuple[int, int]] = []
    for count, step in loops:
        if count == 1:
            continue
        if found and found[-1][1] == count * step:
            found[-1] = (found[-1][0] * count, step)
        else:
            found.append((count, step))
    return tuple(found)


def _by_dims(loops: Loops, shape: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """The loops that each dim runs through."""
    left, dims = list(loops), []
    for size in reversed(shape):
        own: list[tuple[int, int]] = []
        while size > 1:
            count, step = left.pop()
            inner = math.gcd(count, size)
            if inner != min(count, size):
                return None
            if count > inner:
                left.append((count // inner, step * inner))
            own.append((inner, step))
            size //= inner
        dims.append(own[::-1])
    return dims[::-1]
