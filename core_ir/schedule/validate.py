"""Whether a schedule is legal: every task once, in its place, in an order that can run."""

from collections.abc import Collection, Iterable

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import (
    check_is,
    checked_count,
    checked_limit,
    checked_list,
    counted,
)
from plait.core_ir.schedule.dependencies import (
    TaskPositions,
    cross_rank_waits,
    locate_tasks,
)
from plait.core_ir.schedule.durations import compute_times
from plait.core_ir.schedule.edges import resolve_edges
from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.kinds import HAS_STAGE, IS_COMPUTE, OPT, OVERLAP_F_B
from plait.core_ir.schedule.messages import check_messages
from plait.core_ir.schedule.sharding import check_sharding
from plait.core_ir.schedule.timeline import held_during, peak_memory
from plait.core_ir.schedule.times import Memory

# A sum of many floats may exceed a limit that it meets on paper.
_ROUNDING = 1e-9


def validate(
    table: ActionTable,
    *,
    edges: Iterable[tuple[int, int, str]] | None = None,
    memory: Memory | None = None,
    memory_limit: float | None = None,
    ordered_forward: Collection[int] = (),
    forward_only: bool = False,
) -> None:
    """Raise `ScheduleError` unless the schedule is legal; the message names rank, position and
    task.

    Legal means: each stage and microbatch has one F, and one B or one I and one W (with
    `forward_only` just the F), on the rank where the stage is placed; whatever an action needs
    along `edges` (default: those the schedule implies) and from its own stage comes before it,
    without a circle of waits; weight gradients of a stage, and forwards of the stages in
    `ordered_forward`, whose buffers change, run in microbatch order; an optimizer step comes once,
    last; a stage that is gathered (UNSHARD) runs only while it is, and its gradients are reduced once, behind
    the last of them; a rank never holds more than `memory_limit`.

    A lowered schedule also has each message of each edge, sent after its producer, received before
    its consumer, and ends although a send waits for its receive and each rank runs one action at a
    time.

    Takes time linear in the number of actions.
    """
    check_is(memory, Memory | None, "memory", "Memory")
    memory_limit = checked_limit(memory_limit)
    ordered = checked_list(ordered_forward, "ordered_forward")
    ordered = [checked_count(stage, "a stage of ordered_forward", least=0) for stage in ordered]
    if max(ordered, default=0) >= table.num_stages:
        raise ScheduleError(
            f"ordered_forward names stage {max(ordered)}, but schedule {table.name!r} has"
            f" {counted(table.num_stages, 'stage')}"
        )
    resolved = resolve_edges(table, edges)
    _check_placement(table)
    tasks = locate_tasks(table)
    _check_complete(table, tasks, forward_only)
    _check_optimizer(table)
    _check_microbatch_order(table, tasks.weight_gradient, range(table.num_stages))
    _check_microbatch_order(table, tasks.forward, ordered)
    check_sharding(table)
    waits = cross_rank_waits(table, tasks, resolved)
    if table.is_lowered:
        check_messages(table, tasks, resolved)
    else:
        compute_times(table, waits, np.ones(table.num_actions))
    if memory_limit is not None:
        check_memory(table, memory or Memory(), memory_limit)


def check_memory(table: ActionTable, memory: Memory, memory_limit: float) -> None:
    """Raise `ScheduleError` if a rank holds more than `memory_limit`, in the unit of `memory`."""
    if keeps_limit(table, memory, memory_limit):
        return
    held = held_during(table, memory)
    index = int(np.flatnonzero(held > memory_limit * (1 + _ROUNDING))[0])
    rank = int(table.rank_of_action[index])
    raise ScheduleError(
        f"{table.where(index)} makes rank {rank} of schedule {table.name!r} hold {held[index]:g},"
        f" over the memory limit of {memory_limit:g}; it takes {held.max():g}: give at least that, or"
        " take a schedule that holds less"
    )


def keeps_limit(table: ActionTable, memory: Memory, memory_limit: float) -> bool:
    """Whether no rank ever holds more than `memory_limit`, in the unit of `memory`."""
    return bool(peak_memory(table, memory).max() <= memory_limit * (1 + _ROUNDING))


def _check_placement(table: ActionTable) -> None:
    placed = np.array(table.placement)
    misplaced = HAS_STAGE[table.kind] & (placed[table.stage] != table.rank_of_action)
    pair = table.kind == OVERLAP_F_B.code
    misplaced |= pair & (placed[table.other_stage] != table.rank_of_action)
    for index in np.flatnonzero(misplaced)[:1]:
        action = table.action(index)
        stages = sorted({part.stage for part in action.parts if part.stage is not None})
        homes = ", ".join(
            f"stage {stage} is placed on rank {table.placement[stage]}" for stage in stages
        )
        raise ScheduleError(f"{table.where(index)} is on the wrong rank: {homes}")


def _check_complete(table: ActionTable, tasks: TaskPositions, forward_only: bool) -> None:
    for position, letter, needed, later in (
        (tasks.forward, "F", True, tasks.input_gradient),
        (tasks.input_gradient, "I", not forward_only, tasks.weight_gradient),
        (tasks.weight_gradient, "W", not forward_only, None),
    ):
        wrong = np.argwhere((position < 0) if needed else (position >= 0))
        if not wrong.size:
            continue
        stage, microbatch = wrong[0]
        if not needed:
            where = table.where(int(position[stage, microbatch]))
            raise ScheduleError(f"{where} does not belong into a forward-only schedule")
        task = f"{stage}{letter}{microbatch}"
        if letter != "F":
            task += f" (or {stage}B{microbatch})"
        deadline = -1 if later is None else int(later[stage, microbatch])
        before = f", before {table.where(deadline)}" if deadline >= 0 else ""
        raise ScheduleError(
            f"{task} is missing in schedule {table.name!r}: rank {table.placement[stage]}, where"
            f" stage {stage} is placed, must run it once{before}"
        )


def _check_optimizer(table: ActionTable) -> None:
    steps = np.flatnonzero(table.kind == OPT.code)
    ranks = table.rank_of_action[steps]
    for index in steps[1:][ranks[1:] == ranks[:-1]][:1]:
        raise ScheduleError(f"{table.where(index)} is a second optimizer step of this rank")
    for index, rank in zip(steps.tolist(), ranks.tolist(), strict=True):
        behind = np.flatnonzero(IS_COMPUTE[table.kind[index : table.offsets[rank + 1]]])
        if behind.size:
            raise ScheduleError(
                f"{table.where(index)} comes before {table.where(index + int(behind[0]))};"
                " the optimizer step must follow the last task of its rank"
            )


def _check_microbatch_order(
    table: ActionTable, position: IntArray, stages: Collection[int]
) -> None:
    """Gradients are added, and buffers change, by microbatch index, whatever the schedule."""
    chosen = np.array(sorted(stages), dtype=np.int64)
    early = np.argwhere(np.diff(position[chosen], axis=1) < 0)
    for row, microbatch in early[:1]:
        stage = chosen[row]
        raise ScheduleError(
            f"{table.where(int(position[stage, microbatch + 1]))} comes before"
            f" {table.where(int(position[stage, microbatch]))}; stage {stage} must run these in"
            " microbatch order, or its sums would depend on the schedule"
        )
