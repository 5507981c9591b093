"""What every action waits for: where each task is done, and who produces what it needs.

Two kinds of wait are told apart. On one rank the order of the actions settles it, so it is checked
and then dropped. Across ranks it is a dependency in time, kept in `Waits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.edges import Edge
from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.kinds import KINDS, OVERLAP_F_B

_FORWARD = np.array([kind.forward for kind in KINDS])
_INPUT_GRADIENT = np.array([kind.input_gradient for kind in KINDS])
_WEIGHT_GRADIENT = np.array([kind.weight_gradient for kind in KINDS])


@dataclass(frozen=True)
class TaskPositions:
    """The index of the action that does each task: [num_stages, num_microbatches], -1 for none."""

    forward: IntArray
    input_gradient: IntArray
    weight_gradient: IntArray


def locate_tasks(table: ActionTable) -> TaskPositions:
    """Where each task is done. Raises `ScheduleError` when one is done twice."""
    is_pair = table.kind == OVERLAP_F_B.code
    backward_stage = np.where(is_pair, table.other_stage, table.stage)
    backward_microbatch = np.where(is_pair, table.other_microbatch, table.microbatch)
    return TaskPositions(
        _locate(table, _FORWARD, table.stage, table.microbatch),
        _locate(table, _INPUT_GRADIENT, backward_stage, backward_microbatch),
        _locate(table, _WEIGHT_GRADIENT, backward_stage, backward_microbatch),
    )


def _locate(
    table: ActionTable,
    does_task: NDArray[np.bool_],
    stage: NDArray[np.integer],
    microbatch: NDArray[np.integer],
) -> IntArray:
    actions = np.flatnonzero(does_task[table.kind])
    task = stage[actions].astype(np.int64) * table.num_microbatches + microbatch[actions]
    position = np.full(table.num_stages * table.num_microbatches, -1, dtype=np.int64)
    position[task] = actions
    again = np.flatnonzero(position[task] != actions)
    if again.size:
        first, second = actions[again[0]], position[task[again[0]]]
        raise ScheduleError(
            f"{table.where(first)} does a task that {table.where(second)} does again;"
            " each task must be done once"
        )
    return position.reshape(table.num_stages, table.num_microbatches)


class Waits(NamedTuple):
    """The actions on other ranks that each action waits for: [num_actions, width], -1 where none.

    `edge` says along which of the given edges `source` feeds it, -1 within one stage.
    """

    source: IntArray
    edge: IntArray


def cross_rank_waits(table: ActionTable, tasks: TaskPositions, edges: Sequence[Edge]) -> Waits:
    """What every action waits for that another rank does.

    Raises `ScheduleError` when something needed is done by no action, or on the same rank but
    later.
    """
    waits = [(tasks.input_gradient, tasks.forward), (tasks.weight_gradient, tasks.input_gradient)]
    pairs = [(*_wait_pairs(table, *wait), -1) for wait in waits]
    for index, edge in enumerate(edges):
        done = tasks.forward if edge.kind == "activation" else tasks.input_gradient
        pairs.append((*_wait_pairs(table, done[edge.target], done[edge.source]), index))
    target = np.concatenate([pair[0] for pair in pairs])
    source = np.concatenate([pair[1] for pair in pairs])
    edge_of = np.concatenate([np.full(len(pair[0]), pair[2]) for pair in pairs])
    return _pack(target, source, edge_of, table.num_actions)


def _wait_pairs(
    table: ActionTable, target: IntArray, source: IntArray
) -> tuple[IntArray, IntArray]:
    """The (waiting, awaited) actions of one kind of wait that stand on different ranks."""
    target, source = target.ravel(), source.ravel()
    exists = target >= 0
    # B does I and W in one action, which then awaits itself: no wait.
    keep = exists & (target != source)
    target, source = target[keep], source[keep]
    missing = np.flatnonzero(source < 0)
    if missing.size:
        raise ScheduleError(
            f"{table.where(target[missing[0]])} needs the result of a task that no rank does"
        )
    ranks = table.rank_of_action
    local = ranks[target] == ranks[source]
    late = np.flatnonzero(local & (source > target))
    if late.size:
        raise ScheduleError(
            f"{table.where(target[late[0]])} needs {table.where(source[late[0]])},"
            " which comes later on the same rank"
        )
    return target[~local], source[~local]


def _pack(target: IntArray, source: IntArray, edge: IntArray, num_actions: int) -> Waits:
    order = np.argsort(target, kind="stable")
    target = target[order]
    slot = np.arange(len(target)) - np.searchsorted(target, target, side="left")
    width = int(slot.max()) + 1 if slot.size else 0
    waits = Waits(*(np.full((num_actions, width), -1, dtype=np.int64) for _ in range(2)))
    waits.source[target, slot] = source[order]
    waits.edge[target, slot] = edge[order]
    return waits
