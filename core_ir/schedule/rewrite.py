"""Small rewrites of a schedule: without messages, forward only, with the optimizer step."""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.kinds import (
    IS_MESSAGE,
    KINDS,
    OPT,
    OVERLAP_F_B,
    REDUCE_GRAD,
    F,
)

Table = TypeVar("Table", bound=ActionTable)

_IS_FORWARD = np.array([kind.forward for kind in KINDS])
_WEIGHT_GRADIENT = np.array([kind.weight_gradient for kind in KINDS])


def strip_messages(table: Table) -> Table:
    """The schedule without its sends and receives."""
    return keep(table, ~IS_MESSAGE[table.kind])


def keep_forward(table: Table) -> Table:
    """The forward tasks alone: what runs when only the loss is wanted. A pair leaves its F."""
    forward = keep(table, _IS_FORWARD[table.kind])
    nothing = np.full(forward.num_actions, -1)
    return replace(
        forward,
        name=f"{table.name} forward",
        kind=np.full(forward.num_actions, F.code),
        other_stage=nothing,
        other_microbatch=nothing,
    )


def add_optimizer(table: Table) -> Table:
    """The schedule with an OPT action at the end of every rank that has none."""
    has_step = np.zeros(table.num_ranks, dtype=bool)
    has_step[table.rank_of_action[table.kind == OPT.code]] = True
    ranks = np.flatnonzero(~has_step)
    columns = np.full((4, len(ranks)), -1)
    columns[0] = OPT.code
    return insert(table, table.offsets[ranks + 1], ranks, columns)


def add_reductions(table: Table) -> Table:
    """The schedule with a REDUCE_GRAD behind the last weight gradient of every stage that has none."""
    last = last_weight_gradients(table)
    last[table.stage[table.kind == REDUCE_GRAD.code]] = -1
    stages = np.flatnonzero(last >= 0)
    columns = np.full((4, len(stages)), -1)
    columns[0], columns[1] = REDUCE_GRAD.code, stages
    return insert(table, last[stages] + 1, np.array(table.placement)[stages], columns)


def last_weight_gradients(table: ActionTable) -> IntArray:
    """The last action of each stage that gives weight gradients: [num_stages], -1 for none."""
    is_pair = table.kind == OVERLAP_F_B.code
    weight = np.flatnonzero(_WEIGHT_GRADIENT[table.kind])
    stage = np.where(is_pair, table.other_stage, table.stage)
    last = np.full(table.num_stages, -1)
    last[stage[weight]] = weight
    return last


def keep(table: Table, wanted: NDArray[np.bool_]) -> Table:
    """The actions at which the mask `wanted` is true, in their order."""
    if wanted.all():
        return table
    counts = np.bincount(table.rank_of_action[wanted], minlength=table.num_ranks)
    return replace(
        table,
        offsets=np.cumsum([0, *counts]),
        kind=table.kind[wanted],
        stage=table.stage[wanted],
        microbatch=table.microbatch[wanted],
        other_stage=table.other_stage[wanted],
        other_microbatch=table.other_microbatch[wanted],
        cells=table.cells and table.cells._replace(column=table.cells.column[wanted]),
    )


def insert(table: Table, at: IntArray, rank: IntArray, columns: IntArray) -> Table:
    """New actions, each put on `rank` before the action that stands at index `at`.

    `columns` holds their kind, stage, microbatch and other stage, as rows. Several at one place
    keep the order they are given in.
    """
    # One index is both the end of a rank and the begin of the next one: rank by rank, then.
    order = np.argsort(rank, kind="stable")
    at = at[order]
    kind, stage, microbatch, other_stage = columns[:, order]
    counts = np.diff(table.offsets) + np.bincount(rank, minlength=table.num_ranks)
    return replace(
        table,
        offsets=np.cumsum([0, *counts]),
        kind=np.insert(table.kind, at, kind),
        stage=np.insert(table.stage, at, stage),
        microbatch=np.insert(table.microbatch, at, microbatch),
        other_stage=np.insert(table.other_stage, at, other_stage),
        other_microbatch=np.insert(table.other_microbatch, at, -1),
        cells=None,
    )
