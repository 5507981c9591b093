"""Gather a stage's sharded parameters before it runs, free them behind it, reduce its gradients: placed and checked."""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.kinds import (
    IS_COMPUTE,
    KINDS,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
)
from plait.core_ir.schedule.rewrite import insert, last_weight_gradients
from plait.core_ir.shards import ShardedStages

Table = TypeVar("Table", bound=ActionTable)

_IS_BACKWARD = np.array([kind.input_gradient or kind.weight_gradient for kind in KINDS])


class Uses(NamedTuple):
    """Where stages run: actions in order, the stage of each, and whether it is its backward; a pair stands twice."""

    action: IntArray
    stage: IntArray
    is_backward: IntArray


def uses_of(table: ActionTable) -> Uses:
    """Every action that reads the parameters of a stage."""
    own = np.flatnonzero(IS_COMPUTE[table.kind])
    pairs = np.flatnonzero(table.kind == OVERLAP_F_B.code)
    backward = _IS_BACKWARD[table.kind[own]] & (table.kind[own] != OVERLAP_F_B.code)
    action = np.concatenate([own, pairs])
    stage = np.concatenate([table.stage[own], table.other_stage[pairs]])
    is_backward = np.concatenate([backward, np.ones(len(pairs), dtype=bool)])
    order = np.argsort(action, kind="stable")
    return Uses(action[order], stage[order], is_backward[order])


def add_sharding(table: Table, stages: ShardedStages) -> Table:
    """The schedule with UNSHARD, RESHARD and REDUCE_GRAD of sharded stages.

    A stage's UNSHARD stands where the stage that its rank runs before it begins, so that it hides behind that stage's
    first forwards, the first one at the beginning of the rank; RESHARD behind the last action of the stage; REDUCE_GRAD
    behind its last weight gradient. Before -> after, of a rank with stages 0 and 2 and one microbatch:

        0F0 2F0 2B0 0B0  ->  0UNSHARD 2UNSHARD 0F0 2F0 2B0 2RESHARD 2REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD

    With `reshard="after_forward"` a stage is also freed behind the last forward before its first backward, where at
    least two other actions of the rank stand in between, and gathered again beside the last of them:

        0F0 2F0 2B0 0B0  ->  0UNSHARD 2UNSHARD 0F0 0RESHARD 2F0 0UNSHARD 2B0 2RESHARD 2REDUCE_GRAD 0B0 ...

    Stages for which there is such an action already keep what they have.
    """
    uses = uses_of(table)
    freed = np.unique(table.stage[(table.kind == UNSHARD.code) | (table.kind == RESHARD.code)])
    gathered = [s for s in stages.gathered if s not in freed and (uses.stage == s).any()]
    added: list[
        tuple[int, int, int]
    ] = []  # what stands in front of which action: index, kind, stage
    for stage in gathered:
        own = uses.action[uses.stage == stage]
        added.append((int(own[-1]) + 1, RESHARD.code, stage))
        if stages.reshard == "after_forward":
            added += _freed_between(uses, stage)
    added += _first_gathers(table, uses, gathered)
    # At one place: first what frees memory, then what is waited for, then what nobody waits for before the end.
    turn = {RESHARD.code: 0, UNSHARD.code: 1, REDUCE_GRAD.code: 2}
    last = last_weight_gradients(table)
    reduced = set(stages.reduced) - set(table.stage[table.kind == REDUCE_GRAD.code].tolist())
    added += [(int(last[s]) + 1, REDUCE_GRAD.code, s) for s in sorted(reduced) if last[s] >= 0]
    added.sort(key=lambda each: turn[each[1]])
    if not added:
        return table
    at, kind, stage_ = np.array(added, dtype=np.int64).T
    columns = np.full((4, len(added)), -1)
    columns[0], columns[1] = kind, stage_
    return insert(table, at, np.array(table.placement)[stage_], columns)


def _first_gathers(
    table: ActionTable, uses: Uses, gathered: list[int]
) -> Iterator[tuple[int, int, int]]:
    first = {stage: int(uses.action[uses.stage == stage][0]) for stage in gathered}
    before: dict[int, int] = {}  # where the stage that a rank began last begins
    for stage in sorted(gathered, key=first.__getitem__):
        rank = table.placement[stage]
        yield before.get(rank, int(table.offsets[rank])), UNSHARD.code, stage
        before[rank] = first[stage]


def _freed_between(uses: Uses, stage: int) -> list[tuple[int, int, int]]:
    own = uses.stage == stage
    backward = uses.action[own & uses.is_backward]
    if not backward.size:
        return []
    forward = uses.action[own & ~uses.is_backward & (uses.action < backward[0])]
    between = uses.action[(uses.action > forward[-1]) & (uses.action < backward[0])]
    if len(set(between.tolist())) < 2:
        return []
    return [
        (int(forward[-1]) + 1, RESHARD.code, stage),
        (int(between[-1]), UNSHARD.code, stage),
    ]


def check_sharding(table: ActionTable) -> None:
    """Raise `ScheduleError` unless stages that are ever gathered run only while they are, are gathered and freed in
    turn, and free in the end; and unless gradients are reduced once, behind the last weight gradient."""
    changes = np.flatnonzero((table.kind == UNSHARD.code) | (table.kind == RESHARD.code))
    uses = uses_of(table)
    for stage in np.unique(table.stage[changes]).tolist():
        own = uses.action[uses.stage == stage]
        _check_gathers(table, stage, own, changes[table.stage[changes] == stage])
    last = last_weight_gradients(table)
    reduced: dict[int, int] = {}
    for index in np.flatnonzero(table.kind == REDUCE_GRAD.code).tolist():
        stage = int(table.stage[index])
        if stage in reduced:
            raise ScheduleError(
                f"{table.where(index)} comes again after {table.where(reduced[stage])}; a stage's gradients are reduced"
                " once a step"
            )
        reduced[stage] = index
        if last[stage] > index:
            raise ScheduleError(
                f"{table.where(index)} comes before {table.where(int(last[stage]))}, whose gradient it must take in"
            )


def _check_gathers(table: ActionTable, stage: int, own: IntArray, changes: IntArray) -> None:
    """`own` are the actions that run the stage, `changes` its UNSHARDs and RESHARDs."""
    gathers = table.kind[changes] == UNSHARD.code
    wrong = np.flatnonzero(gathers != (np.arange(len(changes)) % 2 == 0))
    if wrong.size:
        index = int(changes[wrong[0]])
        state = "gathered already" if gathers[wrong[0]] else "not gathered"
        raise ScheduleError(f"{table.where(index)}: stage {stage} is {state} there")
    if len(changes) % 2:
        raise ScheduleError(
            f"{table.where(int(changes[-1]))} gathers stage {stage}, and no RESHARD frees it again"
        )
    # An odd number of changes before an action: it stands between an UNSHARD and its RESHARD.
    outside = own[np.searchsorted(changes, own) % 2 == 0]
    if outside.size:
        raise ScheduleError(
            f"{table.where(int(outside[0]))} runs while the parameters of stage {stage} are sharded; put"
            f" {stage}UNSHARD before it"
        )
