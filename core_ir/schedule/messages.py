"""Whether the messages of a lowered schedule are whole, in place, and end.

The strictest runtime is assumed: a rank runs one action at a time, a send waits for its receive,
and two ranks share one ordered channel. Whoever is laxer, with messages in flight or buffered,
ends as well.
"""

from collections.abc import Sequence

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.dependencies import TaskPositions
from plait.core_ir.schedule.edges import Edge, message_edges
from plait.core_ir.schedule.ir import Action, ActionTable, IntArray
from plait.core_ir.schedule.kinds import ActionKind, Payload, message_kinds


def check_messages(table: ActionTable, tasks: TaskPositions, edges: Sequence[Edge]) -> None:
    """Raise `ScheduleError` unless each edge between ranks has its messages and all of them end."""
    crossing = [e for e in edges if table.placement[e.source] != table.placement[e.target]]
    _check_no_others(table, crossing)
    partner = np.full(table.num_actions, -1, dtype=np.int64)
    payloads: tuple[Payload, ...] = ("activation", "gradient")
    for payload in payloads:
        of_kind = [edge for edge in crossing if edge.kind == payload]
        source = np.array([edge.source for edge in of_kind], dtype=np.int64)
        target = np.array([edge.target for edge in of_kind], dtype=np.int64)
        send_kind, receive_kind = message_kinds(payload)
        sends = _locate(table, send_kind, source, target)
        receives = _locate(table, receive_kind, target, source)
        done = tasks.forward if payload == "activation" else tasks.input_gradient
        _check_after(table, sends, done[source])
        _check_after(table, done[target], receives)
        partner[sends], partner[receives] = receives, sends
    _check_ends(table, partner)


def _check_no_others(table: ActionTable, crossing: Sequence[Edge]) -> None:
    for edge in set(message_edges(table)) - set(crossing):
        source, target = edge.source, edge.target
        why = "no edge of the program asks for it"
        if table.placement[source] == table.placement[target]:
            why = f"both are on rank {table.placement[source]}, where no message is needed"
        raise ScheduleError(
            f"schedule {table.name!r} sends an {edge.kind} from stage {source} to stage"
            f" {target}, but {why}"
        )


def _locate(table: ActionTable, kind: ActionKind, stage: IntArray, peer: IntArray) -> IntArray:
    """The actions of `kind` on each edge, exactly one for each microbatch: [edges, microbatches].

    `stage` and `peer` hold the edges' ends, one entry an edge.
    """
    actions = np.flatnonzero(table.kind == kind.code)
    ends = table.stage[actions] * np.int64(table.num_stages) + table.other_stage[actions]
    edge = _index_of(stage * table.num_stages + peer, ends)
    microbatch = table.microbatch[actions]
    for index in actions[edge < 0][:1]:
        raise ScheduleError(f"{table.where(index)} has no counterpart on the rank of its peer")
    position = np.full((len(stage), table.num_microbatches), -1, dtype=np.int64)
    position[edge, microbatch] = actions
    for index in actions[position[edge, microbatch] != actions][:1]:
        raise ScheduleError(f"{table.where(index)} stands more than once on its rank")
    for row, missing in np.argwhere(position < 0)[:1]:
        action = Action(kind, int(stage[row]), int(missing), peer=int(peer[row]))
        raise ScheduleError(
            f"{action} is missing on rank {table.placement[int(stage[row])]} of schedule"
            f" {table.name!r}"
        )
    return position


def _index_of(keys: IntArray, wanted: IntArray) -> IntArray:
    """Where in `keys`, all different, each of `wanted` stands; -1 for nowhere."""
    if not keys.size:
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys)
    found = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
    return np.where(keys[found] == wanted, found, -1)


def _check_after(table: ActionTable, later: IntArray, earlier: IntArray) -> None:
    for row, microbatch in np.argwhere(earlier > later)[:1]:
        raise ScheduleError(
            f"{table.where(int(later[row, microbatch]))} comes before"
            f" {table.where(int(earlier[row, microbatch]))}, which it needs"
        )


def _check_ends(table: ActionTable, partner: IntArray) -> None:
    """Run the ranks: a message moves on when it stands at the head of both of its ranks."""
    match = partner.tolist()
    ranks = table.rank_of_action
    home = ranks.tolist()
    cursor, last = table.offsets[:-1].tolist(), table.offsets[1:].tolist()
    runnable = list(range(table.num_ranks))
    while runnable:
        rank = runnable.pop()
        action, stop = cursor[rank], last[rank]
        while action < stop:
            other = match[action]
            if other >= 0:
                other_rank = home[other]
                if cursor[other_rank] != other:
                    break
                cursor[other_rank] += 1
                runnable.append(other_rank)
            action += 1
        cursor[rank] = action
    blocked = [rank for rank in range(table.num_ranks) if cursor[rank] < last[rank]]
    if blocked:
        heads = "; ".join(
            f"{table.where(cursor[rank])} waits for {table.where(match[cursor[rank]])}"
            for rank in blocked
        )
        raise ScheduleError(f"the messages of schedule {table.name!r} deadlock: {heads}")
