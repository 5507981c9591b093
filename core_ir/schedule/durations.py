"""How long every action takes, and when it runs where messages take no time."""

import numpy as np

from plait.core_ir.schedule.dependencies import Waits
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import KINDS, OPT, OVERLAP_F_B, B, F, I, W
from plait.core_ir.schedule.times import FloatArray, Times, per_stage
from plait.core_ir.schedule.timing import Lanes, earliest_times


def durations(table: ActionTable, times: Times) -> FloatArray:
    """The time of every action, by index; messages take none."""
    num_stages = table.num_stages
    cost = np.zeros((len(KINDS), num_stages))
    for kind, value in ((F, times.f), (I, times.i), (W, times.w), (B, times.b)):
        if value is not None:
            cost[kind.code] = per_stage(value, num_stages, f"Times.{kind.name.lower()}")
    if times.b is None:
        cost[B.code] = cost[I.code] + cost[W.code]
    if times.fb is not None:
        cost[OVERLAP_F_B.code] = per_stage(times.fb, num_stages, "Times.fb")
    duration: FloatArray = cost[table.kind, table.stage]
    if times.fb is None:
        pair = table.kind == OVERLAP_F_B.code
        duration[pair] = cost[F.code, table.stage[pair]] + cost[B.code, table.other_stage[pair]]
    optimizer = per_stage(times.optimizer, num_stages, "Times.optimizer")
    of_rank = np.bincount(table.placement, weights=optimizer, minlength=table.num_ranks)
    step = table.kind == OPT.code
    duration[step] = of_rank[table.rank_of_action[step]]
    return duration


def compute_times(
    table: ActionTable, waits: Waits, duration: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Earliest start and end of every action where values arrive as they are produced.

    Raises `ScheduleError` when actions wait for each other in a circle.
    """
    at_once = np.zeros(waits.source.shape)
    lanes = Lanes(table.offsets, duration, waits.source, at_once)
    return earliest_times(lanes, table.name, table.where)
