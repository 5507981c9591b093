"""When each task runs: a schedule's actions laid out in ticks, the steps in which all ranks move together."""

from collections.abc import Iterator, Mapping, Sequence

from plait.backends.order import TaskOf, reads, tasks_of
from plait.core_ir.errors import ScheduleError
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.ir import ActionTable


def pairs_of(schedule: ActionTable) -> Iterator[tuple[TaskOf, TaskOf]]:
    """The (backward, forward) of every F&B action."""
    for rank in range(schedule.num_ranks):
        for action in schedule.rank(rank):
            if action.partner is not None:
                (_, stage, microbatch), _, forward = tasks_of(action)  # I, W, F
                yield ("B", stage, microbatch), forward


def assign_ticks(schedule: ActionTable, program: Program, *, backward: bool) -> dict[TaskOf, int]:
    """The tick of each task: as early as its rank's order and the edges allow, one action a rank and tick.

    What a task makes for another rank can be read from the next tick on. Without `backward` only F tasks run. Raises
    ScheduleError where ranks wait for each other, or a task is missing.
    """
    queues = [_actions(schedule, rank, backward) for rank in range(schedule.num_ranks)]
    heads = [next(queue, None) for queue in queues]
    ticks: dict[TaskOf, int] = {}
    tick = 0
    while any(head is not None for head in heads):
        started: list[TaskOf] = []
        for rank, head in enumerate(heads):
            if head is not None and all(
                need in ticks or need in head for task in head for need in reads(task, program)
            ):
                started.extend(head)
                heads[rank] = next(queues[rank], None)
        if not started:
            stuck = ", ".join(
                f"rank {r} at {_text(head)}" for r, head in enumerate(heads) if head is not None
            )
            raise ScheduleError(
                f"the schedule {schedule.name!r} cannot run on this program: {stuck} wait for each other"
            )
        ticks.update((task, tick) for task in started)
        tick += 1
    _require_all(schedule, program, ticks, ("F", "I", "W") if backward else ("F",))
    return ticks


def _require_all(
    schedule: ActionTable,
    program: Program,
    ticks: Mapping[TaskOf, int],
    kinds: Sequence[TaskKind],
) -> None:
    for kind in kinds:
        for stage in range(program.num_stages):
            for m in range(schedule.num_microbatches):
                if (kind, stage, m) not in ticks:
                    raise ScheduleError(
                        f"the schedule {schedule.name!r} never runs {_text([(kind, stage, m)])}; a step needs every "
                        f"{kind} of {program.num_stages} stages and {schedule.num_microbatches} microbatches"
                    )


def _actions(schedule: ActionTable, rank: int, backward: bool) -> Iterator[list[TaskOf]]:
    """The tasks of each compute action of a rank, in order."""
    for action in schedule.rank(rank):
        if action.kind.is_compute:
            tasks = [task for task in tasks_of(action) if backward or task[0] == "F"]
            if tasks:
                yield tasks


def _text(tasks: list[TaskOf]) -> str:
    return "+".join(f"{stage}{kind}{microbatch}" for kind, stage, microbatch in tasks)
