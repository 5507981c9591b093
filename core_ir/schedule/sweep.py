"""How large microbatches should be: the same global batch cut into fewer or more of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import check_is, checked_count
from plait.core_ir.schedule.registry import build
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Memory, Times


@dataclass(frozen=True)
class SweepRow:
    """One size of microbatch; `timeline` is None, and `why_not` says why, where none can be built."""

    microbatch_size: int
    num_microbatches: int
    timeline: Timeline | None
    why_not: str = ""

    @property
    def samples_per_time(self) -> float:
        """Samples of the global batch a unit of time; 0 where there is no schedule."""
        if self.timeline is None or self.timeline.makespan == 0:
            return 0.0
        return self.microbatch_size * self.num_microbatches / self.timeline.makespan


def sweep(
    name: str,
    num_ranks: int,
    batch_size: int,
    times: Mapping[int, Times],
    *,
    memory: Mapping[int, Memory] | None = None,
    memory_limit: float | None = None,
    stages_per_rank: int | None = None,
) -> tuple[SweepRow, ...]:
    """Schedule `name` for each microbatch size in `times`, smallest first.

    Small microbatches fill the pipeline better, large ones keep the device busier: `times` and
    `memory` are what was measured or estimated for each size.

    Raises `ScheduleError` for a size that does not divide `batch_size`.
    """
    batch_size = checked_count(batch_size, "batch_size")
    check_is(times, Mapping, "times", "a mapping from microbatch size to plait.Times")
    check_is(memory, Mapping | None, "memory", "a mapping from microbatch size to Memory")
    if memory is not None and not memory.keys() >= times.keys():
        raise ScheduleError(
            f"memory must have the sizes of times, {list(times)}, got {list(memory)}"
        )
    rows = []
    for size in sorted(checked_count(size, "a microbatch size") for size in times):
        if batch_size % size:
            raise ScheduleError(
                f"a global batch of {batch_size} cannot be cut into microbatches of {size}; take sizes"
                " that divide it"
            )
        held = None if memory is None else memory[size]
        try:
            schedule = build(
                name,
                num_ranks,
                batch_size // size,
                stages_per_rank=stages_per_rank,
                times=times[size],
                memory=held,
                memory_limit=memory_limit,
            )
        except ScheduleError as error:
            rows.append(SweepRow(size, batch_size // size, None, str(error)))
            continue
        timeline = schedule.simulate(times[size], held)
        rows.append(SweepRow(size, batch_size // size, timeline))
    return tuple(rows)
