"""Which stages feed which: the edges that order tasks of different stages and become messages.

Edges are any-to-any: a skip connection is an edge. Without edges given, a schedule that holds
messages is read by its own messages, any other as a chain of stages.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import check_is, checked_count, checked_list, counted
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import SEND_B, SEND_F, Payload

_EXPECTED = "(source stage, target stage, 'activation' or 'gradient')"


class Edge(NamedTuple):
    """Stage `source` produces what stage `target` needs.

    `activation`: from F to F. `gradient`: from the end of I (or B) to the start of I (or B).
    """

    source: int
    target: int
    kind: Payload


def chain_edges(num_stages: int) -> tuple[Edge, ...]:
    """Activations to the next stage, gradients to the one before."""
    stages = range(num_stages - 1)
    return tuple(Edge(s, s + 1, "activation") for s in stages) + tuple(
        Edge(s + 1, s, "gradient") for s in stages
    )


def message_edges(table: ActionTable) -> tuple[Edge, ...]:
    """The edges that the sends of a lowered schedule serve, each once, sorted."""
    found: set[Edge] = set()
    payloads: tuple[tuple[int, Payload], ...] = (
        (SEND_F.code, "activation"),
        (SEND_B.code, "gradient"),
    )
    for code, kind in payloads:
        sends = table.kind == code
        pairs = np.unique(
            table.stage[sends] * np.int64(table.num_stages) + table.other_stage[sends]
        )
        found |= {Edge(*divmod(int(pair), table.num_stages), kind) for pair in pairs}
    return tuple(sorted(found))


def sending_order(edge: Edge) -> tuple[str, int]:
    """The key by which messages that are ready at one time are sorted, when lowered and when simulated.

    A rank that sends one and receives another then sends first where it can.
    """
    return (edge.kind, -edge.source if edge.kind == "activation" else edge.source)


def resolve_edges(
    table: ActionTable, edges: Iterable[tuple[int, int, str]] | None
) -> tuple[Edge, ...]:
    """The given edges, checked, each once, sorted; or those that the schedule itself implies.

    A lowered schedule implies the edges of its messages and the chain between neighbours on one
    rank. Raises `ScheduleError` for an unknown kind, a stage that does not exist, or a stage
    feeding itself.
    """
    if edges is not None:
        given = checked_list(edges, "edges")
        return tuple(sorted({_checked(table, edge) for edge in given}))
    chain = chain_edges(table.num_stages)
    if not table.is_lowered:
        return chain
    local = [e for e in chain if table.placement[e.source] == table.placement[e.target]]
    return tuple(sorted({*message_edges(table), *local}))


def _checked(table: ActionTable, edge: tuple[int, int, str]) -> Edge:
    check_is(edge, tuple | list, "an edge", _EXPECTED)
    if len(edge) != 3:
        raise ScheduleError(f"an edge must be {_EXPECTED}, got {edge!r}")
    *ends, kind = edge
    source, target = (checked_count(end, f"edge {tuple(edge)}: a stage", least=0) for end in ends)
    stages = range(table.num_stages)
    if kind not in ("activation", "gradient"):
        raise ScheduleError(
            f"edge {tuple(edge)}: the kind must be 'activation' or 'gradient', got {kind!r}"
        )
    if source not in stages or target not in stages or source == target:
        raise ScheduleError(
            f"edge {tuple(edge)} must join two of the {counted(table.num_stages, 'stage')} of {table.name!r}"
        )
    return Edge(source, target, "activation" if kind == "activation" else "gradient")
