"""When a schedule's actions run, given the times of its tasks, and what they hold meanwhile."""

from collections.abc import Iterable

import numpy as np

from plait.core_ir.schedule.dependencies import cross_rank_sources, locate_tasks
from plait.core_ir.schedule.edges import resolve_edges
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import KINDS, OPT, OVERLAP_F_B, B, F, I, W
from plait.core_ir.schedule.rewrite import add_optimizer, strip_messages
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import FloatArray, Memory, Times, per_stage
from plait.core_ir.schedule.timing import earliest_times


def simulate(
    table: ActionTable,
    times: Times,
    memory: Memory | None = None,
    *,
    edges: Iterable[tuple[int, int, str]] | None = None,
) -> Timeline:
    """The timeline of a schedule whose ranks run their actions in order, each as early as it can.

    `edges` are (source stage, target stage, "activation" | "gradient"), by default those the
    schedule implies. Between ranks a value arrives `times.comm` after its producer ends; messages
    occupy nobody, so the sends and receives of a lowered schedule are left out of the timeline. An
    optimizer time adds an OPT action to ranks without one. Actions without a time (UNSHARD, ...)
    take none.

    Raises `ScheduleError` for a task done twice, a needed task that is missing or late, a
    deadlock, and times or memory that do not fit the stages.
    """
    resolved = resolve_edges(table, edges)
    table = strip_messages(table)
    if np.any(np.asarray(times.optimizer) > 0):
        table = add_optimizer(table)
    sources = cross_rank_sources(table, locate_tasks(table), resolved)
    start, end = earliest_times(table, sources, durations(table, times), times.comm)
    return Timeline(table, start, end, memory or Memory())


def durations(table: ActionTable, times: Times) -> FloatArray:
    """The time of every action, by index."""
    num_stages = table.num_stages
    cost = np.zeros((len(KINDS), num_stages))
    for kind, value in ((F, times.f), (I, times.i), (W, times.w), (B, times.b)):
        if value is not None:
            cost[kind.code] = per_stage(value, num_stages, f"Times.{kind.name.lower()}")
    if times.b is None:
        cost[B.code] = cost[I.code] + cost[W.code]
    if times.fb is not None:
        cost[OVERLAP_F_B.code] = per_stage(times.fb, num_stages, "Times.fb")
    duration = cost[table.kind, table.stage]
    if times.fb is None:
        pair = table.kind == OVERLAP_F_B.code
        duration[pair] = cost[F.code, table.stage[pair]] + cost[B.code, table.other_stage[pair]]
    optimizer = per_stage(times.optimizer, num_stages, "Times.optimizer")
    of_rank = np.bincount(table.placement, weights=optimizer, minlength=table.num_ranks)
    step = table.kind == OPT.code
    duration[step] = of_rank[table.rank_of_action[step]]
    return duration
