"""How a parameter lies in shards over the ranks of an axis, and which stages of a program are sharded.

A shard is a run of rows: dim 0 is cut into chunks of `ceil(rows / ranks)`, one a rank, in the order of ranks. Where
that does not come out even, the last ranks hold fewer rows, or none; inside programs, whose types are the same on every
rank, their shards are padded to full chunks. A parameter with fewer rows than ranks, or without dims, stays whole.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from plait.core_ir.mesh import Layout
from plait.core_ir.types import TensorType

Reshard: TypeAlias = Literal["after_backward", "after_forward"]
"""When the gathered parameters of a stage are freed: behind its last backward alone, or behind its forwards too."""


@dataclass(frozen=True)
class ShardedStages:
    """What a schedule has to know of a sharded program: the stages whose parameters are gathered, those whose
    gradients are reduced, in order, and when gathered parameters are freed."""

    gathered: tuple[int, ...]
    reduced: tuple[int, ...]
    reshard: Reshard = "after_backward"


def shard_layout(layout: Layout, axis: str) -> Layout:
    """How shards along an axis make up the whole of which ranks hold parts already: dim 0 is cut once more."""
    first, rest = (layout[0], layout[1:]) if layout else ((), ())
    return ((*first, axis), *rest)


def shard_type(whole: TensorType, size: int) -> TensorType | None:
    """The type of a shard, padded, over `size` ranks; None for what stays whole."""
    if size < 2 or not whole.rank or whole.shape[0] < size or not whole.size:
        return None
    return whole.with_shape((-(-whole.shape[0] // size), *whole.shape[1:]))


def shard_rows(num_rows: int, size: int, number: int) -> slice:
    """Which rows the shard of a rank, by its number along the axis, holds; without padding."""
    chunk = -(-num_rows // size)
    return slice(min(number * chunk, num_rows), min((number + 1) * chunk, num_rows))
