"""Which tasks an action runs, which it waits for, and all ranks' actions in one order."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from plait.core_ir.errors import ScheduleError
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.ir import Action, ActionTable
from plait.core_ir.schedule.kinds import REDUCE_GRAD, RESHARD, UNSHARD, ActionKind
from plait.core_ir.schedule.sharding import add_sharding

TaskOf: TypeAlias = tuple[TaskKind, int, int]
"""A task of one stage and one microbatch."""

_TASKS: Mapping[str, tuple[TaskKind, ...]] = MappingProxyType(
    {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
)


def tasks_of(action: Action) -> Iterator[TaskOf]:
    """The tasks of a microbatch that an action runs, in order: of an F&B pair the backward first."""
    if not action.kind.is_compute:
        return
    for part in reversed(action.parts):
        assert part.stage is not None, part
        assert part.microbatch is not None, part
        for kind in _TASKS[part.kind.name]:
            yield kind, part.stage, part.microbatch


def pair_of(action: Action) -> tuple[int, int] | None:
    """(stage of the forward, stage of the backward) of an F&B action, None of any other."""
    if action.partner is None:
        return None
    forward, backward = (part.stage for part in action.parts)
    assert forward is not None, action
    assert backward is not None, action
    return forward, backward


def awaited(action: Action, program: Program) -> set[TaskOf]:
    """The tasks that must have run before a compute action; none before any other."""
    needs, done = set[TaskOf](), set[TaskOf]()
    for task in tasks_of(action):
        needs.update(needed for needed in reads(task, program) if needed not in done)
        done.add(task)
    return needs


def is_forward(action: Action) -> bool:
    """Whether an action runs where only the loss is wanted."""
    return action.kind.forward or action.kind in (UNSHARD, RESHARD)


def linear_order(schedule: ActionTable, program: Program) -> list[Action]:
    """The compute actions of all ranks in one order that keeps each rank's own order and every dependency; of a sharded
    program also what gathers parameters and reduces gradients.

    ScheduleError where there is none.
    """
    kinds = set[ActionKind]()
    if program.sharded_stages is not None:
        schedule = add_sharding(schedule, program.sharded_stages)
        kinds = {UNSHARD, RESHARD, REDUCE_GRAD}
    rows = (schedule.rank(rank) for rank in range(schedule.num_ranks))
    queues = [iter([a for a in row if a.kind.is_compute or a.kind in kinds]) for row in rows]
    heads = [next(queue, None) for queue in queues]
    done: set[TaskOf] = set()
    order: list[Action] = []
    while any(head is not None for head in heads):
        before = len(order)
        for rank, queue in enumerate(queues):
            head = heads[rank]
            if head is not None and awaited(head, program) <= done:
                order.append(head)
                done.update(tasks_of(head))
                heads[rank] = next(queue, None)
        if len(order) == before:
            stuck = ", ".join(f"rank {r} at {h}" for r, h in enumerate(heads) if h is not None)
            raise ScheduleError(
                f"the schedule cannot run on this program: {stuck} wait for each other"
            )
    return order


def reads(task: TaskOf, program: Program) -> Iterator[TaskOf]:
    """The tasks whose results a task reads."""
    kind, stage, microbatch = task
    if kind == "W":
        yield "I", stage, microbatch
        return
    if kind == "I":
        yield "F", stage, microbatch
    for edge in program.edges_into(stage, "activation" if kind == "F" else "gradient"):
        yield kind, edge.source, microbatch
