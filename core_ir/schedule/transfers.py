"""The communication lane of each rank: what it sends, gathers and reduces, in the order in which it is produced."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from plait.core_ir.schedule.collectives import collectives
from plait.core_ir.schedule.dependencies import Waits, cross_rank_waits, locate_tasks
from plait.core_ir.schedule.durations import durations, left_behind
from plait.core_ir.schedule.edges import Edge, sending_order
from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.times import FloatArray, Times, per_edge
from plait.core_ir.schedule.timing import Lanes, earliest_times

# Times have settled once none changes by more than this share of the whole.
_SETTLED = 1e-12


@dataclass(frozen=True, eq=False)
class Transfers:
    """The messages of a timeline as arrays: by sending rank, then in time.

    `producer` and `consumer` are indices of actions, `edge` an index into `edges`. A message is on
    its rank's lane from `start` to `end` and with its consumer at `arrival`.

    An UNSHARD or a REDUCE_GRAD that takes time stands among them as its own producer, along no edge (-1); its
    consumer is what waits for it, or -1.
    """

    edges: tuple[Edge, ...]
    producer: IntArray
    consumer: IntArray
    edge: IntArray
    start: FloatArray
    end: FloatArray
    arrival: FloatArray

    @property
    def num_messages(self) -> int:
        return len(self.producer)


def timed_with_transfers(
    table: ActionTable, waits: Waits, edges: Sequence[Edge], duration: FloatArray, times: Times
) -> tuple[FloatArray, FloatArray]:
    """Earliest start and end of every action, with messages that take `times.transfer` and arrive
    `times.comm` later, and with collectives beside them. Actions take `times.slowdown` times as long while
    their rank's lane is occupied.

    Raises `ScheduleError` when actions wait for each other in a circle.
    """
    behind = left_behind(table, times, duration)
    latency, _ = _edge_costs(table, edges, times)
    delay = latency[waits.edge] - _behind(waits.source, waits.edge, edges, behind)
    lanes = Lanes(table.offsets, duration, waits.source, delay)
    messages = _messages(table, waits, edges, times)
    if messages.occupied.any():
        lanes = _with_sending_lanes(table, lanes, messages)
        ready = _behind(messages.producer, messages.edge, edges, behind)
        lanes.delay[table.num_actions :, 0] = -ready
        if times.slowdown > 1:
            lanes = _slowed_by_sending(table, lanes, messages, times.slowdown)
    start, end = earliest_times(lanes, table.name, table.where)
    return start[: table.num_actions], end[: table.num_actions]


def trace_transfers(
    table: ActionTable, edges: Sequence[Edge], times: Times, end: FloatArray
) -> Transfers:
    """The messages of a schedule without messages whose actions end at `end`."""
    waits = cross_rank_waits(table, locate_tasks(table), edges)
    messages = _messages(table, waits, edges, times)
    behind = left_behind(table, times, durations(table, times))
    start = end[messages.producer] - _behind(messages.producer, messages.edge, edges, behind)
    done = np.empty_like(start)
    # A lane is free at 0; its messages stand in the order of their producers, rank by rank.
    free = [0.0] * table.num_ranks
    rank = table.rank_of_action[messages.producer]
    for index, lane in enumerate(rank.tolist()):
        start[index] = max(start[index], free[lane])
        free[lane] = done[index] = start[index] + messages.occupied[index]
    return Transfers(
        tuple(edges),
        messages.producer,
        messages.consumer,
        messages.edge,
        start,
        done,
        done + messages.latency,
    )


class _Messages(NamedTuple):
    """Who waits for whom along which edge, by producer, and what that costs; `slot` is the column of the wait.

    A collective has no edge, and a consumer only where something waits for it: else -1.
    """

    producer: IntArray
    consumer: IntArray
    slot: IntArray
    edge: IntArray
    occupied: FloatArray
    latency: FloatArray


def _messages(table: ActionTable, waits: Waits, edges: Sequence[Edge], times: Times) -> _Messages:
    consumer, slot = np.nonzero(waits.edge >= 0)
    producer, edge = waits.source[consumer, slot], waits.edge[consumer, slot]
    latency, occupied = _edge_costs(table, edges, times)
    # The order of production is the order of actions on the rank; what one action sends, as `lower` puts it.
    turn = np.empty(len(edges), dtype=np.int64)
    turn[sorted(range(len(edges)), key=lambda index: sending_order(edges[index]))] = range(
        len(edges)
    )
    added = collectives(table, times)
    nothing = np.full(len(added.action), -1)
    producer = np.concatenate([producer, added.action])
    order = np.lexsort((np.concatenate([turn[edge], nothing]), producer))
    columns = (
        np.concatenate([consumer, added.consumer])[order],
        np.concatenate([slot, _free_slots(waits, added.consumer)])[order],
        np.concatenate([edge, nothing])[order],
    )
    cost = np.concatenate([occupied[edge], added.seconds])[order]
    late = np.concatenate([latency[edge], np.zeros(len(nothing))])[order]
    return _Messages(producer[order], *columns, cost, late)


def _free_slots(waits: Waits, consumer: IntArray) -> IntArray:
    """A column for one more wait of each consumer, behind those that it has; 0 where there is none (-1)."""
    taken = (waits.source >= 0).sum(axis=1)
    slots = np.zeros(len(consumer), dtype=np.int64)
    for number in np.flatnonzero(consumer >= 0):
        slots[number] = taken[consumer[number]]
        taken[consumer[number]] += 1
    return slots


def _edge_costs(
    table: ActionTable, edges: Sequence[Edge], times: Times
) -> tuple[FloatArray, FloatArray]:
    """Latency and time on the lane of each edge; the last entry, read by index -1, is 0."""
    crossing = [table.placement[e.source] != table.placement[e.target] for e in edges]
    pairs = [(e.source, e.target) for e, crosses in zip(edges, crossing, strict=True) if crosses]
    costs = []
    for value, what in ((times.comm, "Times.comm"), (times.transfer, "Times.transfer")):
        cost = np.zeros(len(edges) + 1)
        cost[:-1][crossing] = per_edge(value, pairs, what)
        costs.append(cost)
    return costs[0], costs[1]


def _behind(
    producer: IntArray, edge: IntArray, edges: Sequence[Edge], behind: FloatArray
) -> FloatArray:
    """How long before the end of its producer each message is there; 0 along no edge."""
    is_gradient = np.array([*(e.kind == "gradient" for e in edges), False]).astype(np.int64)
    found: FloatArray = np.where(edge >= 0, behind[is_gradient[edge], producer], 0.0)
    return found


def _with_sending_lanes(table: ActionTable, lanes: Lanes, messages: _Messages) -> Lanes:
    """Add a lane a rank for its messages: one waits for its producer, its consumer for it."""
    sent = np.bincount(table.rank_of_action[messages.producer], minlength=table.num_ranks)
    offsets = np.cumsum([0, *np.diff(table.offsets), *sent])
    width = int(messages.slot.max(initial=0)) + 1
    added = ((0, len(messages.producer)), (0, max(0, width - lanes.sources.shape[1])))
    sources = np.pad(lanes.sources, added, constant_values=-1)
    awaited = np.flatnonzero(messages.consumer >= 0)
    consumer, slot = messages.consumer[awaited], messages.slot[awaited]
    sources[consumer, slot] = table.num_actions + awaited
    sources[table.num_actions :, 0] = messages.producer
    duration = np.concatenate([lanes.duration, messages.occupied])
    delay = np.pad(lanes.delay, added)
    delay[consumer, slot] = messages.latency[awaited]
    return Lanes(offsets, duration, sources, delay)


def _slowed_by_sending(
    table: ActionTable, lanes: Lanes, messages: _Messages, slowdown: float
) -> Lanes:
    """The lanes with actions that take `slowdown` times as long while their rank's lane is occupied.

    When an action starts, all that its rank sends meanwhile is known: messages of its earlier actions,
    which occupy the lane without a gap until the last of them has left. So the time of an action
    follows from its start and from that moment, and both from the times before them: repeating this
    with the times it gives ends, and in the only times that fit. A few dozen rounds do, since a
    change mostly moves both alike.
    """
    work = lanes.duration[: table.num_actions]
    last = _last_message_before(table, messages)
    sends = last >= 0
    duration = lanes.duration.copy()
    while True:
        start, end = earliest_times(lanes._replace(duration=duration), table.name, table.where)
        busy = np.zeros(table.num_actions)
        left = end[table.num_actions :][last[sends]]
        busy[sends] = np.maximum(left - start[: table.num_actions][sends], 0.0)
        slowed = np.minimum(work * slowdown, work + busy * (1 - 1 / slowdown))
        change = np.abs(slowed - duration[: table.num_actions]).max(initial=0.0)
        duration[: table.num_actions] = slowed
        if change <= _SETTLED * end.max(initial=0.0):
            return lanes._replace(duration=duration)


def _last_message_before(table: ActionTable, messages: _Messages) -> IntArray:
    """The last message that earlier actions of its rank send, for every action; -1 for none."""
    actions = np.arange(table.num_actions)
    # Messages stand in the order of their producers, which is rank by rank.
    last = np.searchsorted(messages.producer, actions, side="left") - 1
    first = np.searchsorted(messages.producer, table.offsets[:-1], side="left")
    return np.where(last >= first[table.rank_of_action], last, -1)
