"""Add the communication to a schedule: a send and a receive for each value that changes ranks, and what gathers
sharded parameters and reduces their gradients."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from plait.core_ir.schedule.dependencies import TaskPositions, cross_rank_waits, locate_tasks
from plait.core_ir.schedule.durations import compute_times, durations
from plait.core_ir.schedule.edges import Edge, resolve_edges, sending_order
from plait.core_ir.schedule.ir import ActionTable, IntArray
from plait.core_ir.schedule.kinds import message_kinds
from plait.core_ir.schedule.rewrite import insert, strip_messages
from plait.core_ir.schedule.sharding import add_sharding
from plait.core_ir.schedule.times import FloatArray, Times
from plait.core_ir.shards import ShardedStages

Table = TypeVar("Table", bound=ActionTable)

# Any times without a 0 would do: a producer then starts before its message, a consumer does not.
_UNIT_TIMES = Times(f=1, i=1, w=1)


def lower(
    table: Table,
    edges: Iterable[tuple[int, int, str]] | None = None,
    sharded: ShardedStages | None = None,
) -> Table:
    """The schedule with messages: one per (stage, microbatch, peer stage) of each edge between
    ranks; and with UNSHARD, RESHARD and REDUCE_GRAD of `sharded` stages, see `sharding.add_sharding`.

    `edges` are (source stage, target stage, "activation" | "gradient"), by default a chain of
    stages. Before -> after, rank 0 and rank 1 of one microbatch:

        0F0 0B0    ->  0F0 0SEND_F0 0RECV_B0 0B0
        1F0 1B0    ->  1RECV_F0 1F0 1B0 1SEND_B0

    A send follows its producer at once, a receive stands where the value can arrive first. No
    legal schedule can deadlock on it: the schedule is run in unit times, which puts all messages
    into one order, by the end of their producers, and sender and receiver both keep to this order.
    So they can be carried out one by one, with both ranks at the matching actions, even if a send
    waits for its receive and two ranks share one ordered channel.

    Messages already there are replaced, by default for the same edges. Raises `ScheduleError`
    where the schedule cannot run.
    """
    resolved = resolve_edges(table, edges)
    computes = strip_messages(table)
    if sharded is not None:
        computes = add_sharding(computes, sharded)
    tasks = locate_tasks(computes)
    waits = cross_rank_waits(computes, tasks, resolved)
    start, end = compute_times(computes, waits, durations(computes, _UNIT_TIMES))

    columns, producer = _messages(computes, tasks, resolved)
    # A stable sort: messages at one time keep one order, the same for senders and receivers.
    order = np.argsort(end[producer], kind="stable")
    columns, time = columns[:, order], end[producer[order]]
    rank = np.array(computes.placement)[columns[1]]
    return insert(computes, _first_action_from(computes, start, rank, time), rank, columns)


def _messages(
    table: ActionTable, tasks: TaskPositions, edges: Sequence[Edge]
) -> tuple[IntArray, IntArray]:
    """Sends and receives side by side: rows kind, stage, microbatch, peer; and their producers.

    A microbatch without a consumer, as gradients in a forward-only schedule, has no message.
    """
    columns, producers = [np.empty((4, 0), dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for source, target, payload in sorted(edges, key=sending_order):
        if table.placement[source] == table.placement[target]:
            continue
        send, receive = message_kinds(payload)
        done = tasks.forward if payload == "activation" else tasks.input_gradient
        microbatch = np.flatnonzero(done[target] >= 0)
        both = np.empty((4, len(microbatch), 2), dtype=np.int64)
        both[0] = send.code, receive.code
        both[1] = source, target
        both[2] = microbatch[:, np.newaxis]
        both[3] = target, source
        columns.append(both.reshape(4, -1))
        producers.append(np.repeat(done[source, microbatch], 2))
    return np.concatenate(columns, axis=1), np.concatenate(producers)


def _first_action_from(
    table: ActionTable, start: FloatArray, rank: IntArray, time: FloatArray
) -> IntArray:
    """The first action of each `rank` that starts at `time` or later, or the end of the rank."""
    # Ranks side by side on one axis make the starts of all of them one sorted array.
    width = start.max(initial=0.0) + time.max(initial=0.0) + 1
    key = table.rank_of_action * width + start
    found: IntArray = np.searchsorted(key, rank * width + time, side="left")
    return found
