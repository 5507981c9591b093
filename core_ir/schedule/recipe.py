"""How a schedule is declared: once, with its name, formulas, needs and builder.

The formulas are Python expressions of p ranks, m microbatches, v stages a rank and the task times
F, I, W (B = I + W; FB, an overlapped pair) of equal stages without communication, so that what
`list` shows is what tests evaluate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import check_is, check_size, checked_count, checked_limit
from plait.core_ir.schedule.ir import ActionTable, Column
from plait.core_ir.schedule.times import Memory, Times


@dataclass(frozen=True)
class Request:
    """What a builder is asked for; searches use `times`, `memory` and `memory_limit`.

    Raises `ScheduleError` for what is no number of its kind, and for more tasks than can be held.
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1
    times: Times | None = None
    memory: Memory | None = None
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        for column in ("num_ranks", "num_microbatches", "stages_per_rank"):
            object.__setattr__(self, column, checked_count(getattr(self, column), column))
        object.__setattr__(self, "memory_limit", checked_limit(self.memory_limit))
        check_is(self.times, Times | None, "times", "plait.Times")
        check_is(self.memory, Memory | None, "memory", "Memory")
        check_size(self.num_stages, self.num_microbatches)

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.stages_per_rank


Builder = Callable[[Request], ActionTable]


@dataclass(frozen=True)
class Recipe:
    """One named schedule.

    `bubble` is the idle time of a rank within the longest stage span, `memory` the peak of stage
    activations on the rank that holds most; both hold for at least 2 p microbatches, a multiple of
    p where stages go round. `bubble` is exact where W is not longer than F and I, on a V of stages
    where F, I and W take equally long; a search finds no more than this. The builder places
    `stages_per_rank` stages on a rank, a default if `stages_are_free`.
    """

    name: str
    summary: str
    bubble: str
    memory: str
    needs: str
    build: Builder
    stages_per_rank: int = 1
    stages_are_free: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ScheduleError(f"a schedule needs a name, got {self.name!r}")
        checked_count(self.stages_per_rank, f"schedule {self.name!r}: stages_per_rank")
        if not callable(self.build):
            raise ScheduleError(
                f"the builder of schedule {self.name!r} must be a function of a Request, got {self.build!r}"
            )


class Row(NamedTuple):
    """The actions of one rank as arrays, for schedules without pairs."""

    kind: Column
    stage: Column
    microbatch: Column


def table_from_rows(
    name: str, placement: Sequence[int], num_microbatches: int, rows: Sequence[Row]
) -> ActionTable:
    """A table from each rank's actions as arrays."""
    kind, stage, microbatch = (np.concatenate(column) for column in zip(*rows, strict=True))
    nothing = np.full(len(kind), -1)
    offsets = np.cumsum([0, *(len(row.kind) for row in rows)])
    return ActionTable(
        name,
        tuple(placement),
        len(rows),
        num_microbatches,
        offsets,
        kind,
        stage,
        microbatch,
        nothing,
        nothing,
    )
