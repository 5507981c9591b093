"""The UNSHARDs and REDUCE_GRADs of a schedule on the communication lane: how long, and who waits for them."""

from typing import NamedTuple

import numpy as np

from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.kinds import OPT, REDUCE_GRAD, UNSHARD
from plait.core_ir.schedule.sharding import uses_of
from plait.core_ir.schedule.times import FloatArray, Times, per_stage


class Collectives(NamedTuple):
    """Actions that occupy their rank's lane for `seconds`; `consumer` is what waits for each, -1 for nothing."""

    action: IntArray
    consumer: IntArray
    seconds: FloatArray


def collectives(table: ActionTable, times: Times) -> Collectives:
    """The UNSHARDs and REDUCE_GRADs that take time.

    What runs a stage first after its UNSHARD waits for that. A rank's optimizer step waits for its last REDUCE_GRAD:
    the others have left the lane by then.
    """
    costs = np.zeros((2, table.num_stages))
    costs[0] = per_stage(times.unshard, table.num_stages, "Times.unshard")
    costs[1] = per_stage(times.reduce_grad, table.num_stages, "Times.reduce_grad")
    gathers, reductions = (
        np.array(
            [i for i in np.flatnonzero(table.kind == kind.code) if cost[table.stage[i]] > 0]
        ).astype(np.int64)
        for kind, cost in zip((UNSHARD, REDUCE_GRAD), costs, strict=True)
    )
    return Collectives(
        np.concatenate([gathers, reductions]),
        np.concatenate([_first_uses(table, gathers), _steps(table, reductions)]),
        np.concatenate([costs[0, table.stage[gathers]], costs[1, table.stage[reductions]]]),
    )


def _first_uses(table: ActionTable, gathers: IntArray) -> IntArray:
    """The first action after each UNSHARD that runs its stage."""
    uses = uses_of(table)
    found = np.full(len(gathers), -1, dtype=np.int64)
    for number, index in enumerate(gathers.tolist()):
        own = uses.action[uses.stage == table.stage[index]]
        at = int(np.searchsorted(own, index))
        found[number] = own[at] if at < len(own) else -1
    return found


def _steps(table: ActionTable, reductions: IntArray) -> IntArray:
    """The optimizer step that waits for each reduction, which only the last of a rank has."""
    steps = np.full(table.num_ranks, -1, dtype=np.int64)
    optimizer = np.flatnonzero(table.kind == OPT.code)
    steps[table.rank_of_action[optimizer]] = optimizer
    rank = table.rank_of_action[reductions]
    is_last = np.ones(len(rank), dtype=bool)
    is_last[:-1] = rank[1:] != rank[:-1]
    return np.where(is_last, steps[rank], -1)
