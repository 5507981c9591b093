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


def left_behind(table: ActionTable, times: Times, duration: FloatArray) -> FloatArray:
    """How long before its end each action has what it sends: [2, actions], activations and gradients.

    Of an action of several parts, each takes its share of the action's time: I, then F, then W.
    """
    behind = np.zeros((2, table.num_actions))
    if not times.early:
        return behind
    f, i, w = (
        per_stage(value, table.num_stages, f"Times.{name}")
        for name, value in (("f", times.f), ("i", times.i), ("w", times.w))
    )
    pair = table.kind == OVERLAP_F_B.code
    backward = np.where(pair, table.other_stage, table.stage)
    own_f = np.where(pair, f[table.stage], 0.0)
    whole = own_f + i[backward] + w[backward]
    share = np.divide(duration, whole, out=np.zeros_like(whole), where=whole > 0)
    behind[0] = np.where(pair, w[backward], 0.0) * share
    behind[1] = np.where(pair | (table.kind == B.code), own_f + w[backward], 0.0) * share
    return behind


def compute_times(
    table: ActionTable, waits: Waits, duration: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Earliest start and end of every action where values arrive as they are produced.

    Raises `ScheduleError` when actions wait for each other in a circle.
    """
    at_once = np.zeros(waits.source.shape)
    lanes = Lanes(table.offsets, duration, waits.source, at_once)
    return earliest_times(lanes, table.name, table.where)
