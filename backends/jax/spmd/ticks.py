"""When each task runs: a schedule's actions laid out in ticks, the steps in which all ranks move together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from plait.core_ir.errors import ScheduleError
from plait.core_ir.program import EdgeKind, Program, TaskKind
from plait.core_ir.schedule.ir import Action, ActionTable

Task: TypeAlias = tuple[TaskKind, int, int]
"""(kind, stage, microbatch)."""

TASKS_OF: dict[str, tuple[TaskKind, ...]] = {
    "F": ("F",),
    "I": ("I",),
    "W": ("W",),
    "B": ("I", "W"),
}


def pairs_of(schedule: ActionTable) -> Iterator[tuple[Task, Task]]:
    """The (backward, forward) of every F&B action."""
    for rank in range(schedule.num_ranks):
        for action in schedule.rank(rank):
            backward = action.partner
            if backward is not None:
                yield _task("B", backward), _task("F", action)


def assign_ticks(schedule: ActionTable, program: Program, *, backward: bool) -> dict[Task, int]:
    """The tick of each task: as early as its rank's order and the edges allow, one action a rank and tick.

    What a task makes for another rank can be read from the next tick on. Without `backward` only F tasks run. Raises
    ScheduleError where ranks wait for each other, or a task is missing.
    """
    queues = [_actions(schedule, rank, backward) for rank in range(schedule.num_ranks)]
    heads = [next(queue, None) for queue in queues]
    ticks: dict[Task, int] = {}
    tick = 0
    while any(head is not None for head in heads):
        started: list[Task] = []
        for rank, head in enumerate(heads):
            if head is not None and all(need in ticks for need in _needs(head, program)):
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
    ticks: Mapping[Task, int],
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


def _actions(schedule: ActionTable, rank: int, backward: bool) -> Iterator[list[Task]]:
    """The tasks of each compute action of a rank, in order."""
    for action in schedule.rank(rank):
        if action.kind.is_compute:
            tasks = [t for part in action.parts for t in _tasks(part) if backward or t[0] == "F"]
            if tasks:
                yield tasks


def _tasks(action: Action) -> Iterator[Task]:
    for kind in TASKS_OF[action.kind.name]:
        yield _task(kind, action)


def _task(kind: TaskKind, action: Action) -> Task:
    assert action.stage is not None, action
    assert action.microbatch is not None, action
    return kind, action.stage, action.microbatch


def _needs(tasks: list[Task], program: Program) -> Iterator[Task]:
    """The tasks that must have run before, without those of the action itself."""
    for kind, stage, microbatch in tasks:
        edge_kind: EdgeKind = "activation" if kind == "F" else "gradient"
        source_kind: TaskKind = "F" if kind == "F" else "I"
        for edge in program.edges_into(stage, edge_kind):
            yield source_kind, edge.source, microbatch
        if kind != "F":
            own: Task = ("F" if kind == "I" else "I", stage, microbatch)
            if own not in tasks:
                yield own


def _text(tasks: list[Task]) -> str:
    return "+".join(f"{stage}{kind}{microbatch}" for kind, stage, microbatch in tasks)
