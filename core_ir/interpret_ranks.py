"""The meaning of a graph on all ranks of a device mesh at once.

Each rank is interpreted in a thread of its own; at a collective the ranks of its group meet, and the last to arrive
evaluates it for all. So collectives may stand in loops and branches; where ranks do not meet, that is an error.
"""

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition
from typing import TypeAlias

from plait.core_ir.errors import ExecutionError, UsageError
from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.interpret import interpret_with
from plait.core_ir.op import Array, Run

_Group: TypeAlias = tuple[str, tuple[int, ...]]
"""An axis, and the place of its ranks along all axes, which is 0 along this one."""


def interpret_ranks(
    graph: Graph, operands_by_rank: Sequence[Sequence[Array]], mesh: Mapping[str, int]
) -> list[list[Array]]:
    """Run one graph on every rank of a mesh; the outputs of each rank.

    mesh: number of ranks along each axis. Ranks are numbered by their coordinates in row-major order.

    Raises
    ------
    UsageError: an axis of the graph is not in the mesh, or has another size there; or the operands are not those of as
    many ranks.
    ExecutionError: as `interpret`; and where the ranks of a group do not run the same collectives in the same order.
    """
    _check_axes(graph, mesh)
    ranks = list(itertools.product(*(range(size) for size in mesh.values())))
    if len(operands_by_rank) != len(ranks):
        raise UsageError(
            f"graph {graph.name}: a mesh {dict(mesh)} has {len(ranks)} ranks, got operands of {len(operands_by_rank)}"
        )
    place = _Place(len(ranks))
    axes = list(mesh)

    def run_rank(rank: tuple[int, ...], operands: Sequence[Array]) -> list[Array]:
        def evaluate(eqn: Eqn, arrays: Sequence[Array], run: Run) -> Sequence[Array]:
            over_ranks = eqn.op.evaluate_ranks
            if over_ranks is None:
                return eqn.op.evaluate(arrays, eqn.attrs, run)
            number = axes.index(eqn.attrs["axis"])
            if not eqn.op.effect:  # asks for the place alone: nobody to meet
                return over_ranks([arrays] * eqn.attrs["size"], eqn.attrs)[rank[number]]
            group = eqn.attrs["axis"], (*rank[:number], 0, *rank[number + 1 :])
            return place.meet(group, rank[number], eqn, arrays)

        try:
            return interpret_with(evaluate, graph, operands)
        finally:
            place.leave()

    with ThreadPoolExecutor(len(ranks)) as threads:
        runs = [threads.submit(run_rank, *of) for of in zip(ranks, operands_by_rank, strict=True)]
    errors = [e for run in runs if (e := run.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, _NobodyComesError)):
        raise error
    return [run.result() for run in runs]


class _NobodyComesError(ExecutionError):
    """Some ranks wait in a collective for others that wait elsewhere, have ended, or have failed."""


def _check_axes(graph: Graph, mesh: Mapping[str, int]) -> None:
    for eqn in graph.eqns:
        if eqn.op.evaluate_ranks is not None:
            axis, size = eqn.attrs["axis"], eqn.attrs["size"]
            where = f"graph {graph.name}: {eqn.op.name} over {axis!r} ({eqn.source})"
            if axis not in mesh:
                raise UsageError(f"{where}: the mesh {dict(mesh)} has no such axis")
            if size != mesh[axis]:
                raise UsageError(f"{where} is of {size} ranks; the mesh has {mesh[axis]} along it")
        for attr in eqn.attrs.values():
            for nested in attr if isinstance(attr, tuple) else (attr,):
                if isinstance(nested, Graph):
                    _check_axes(nested, mesh)


@dataclass
class _Meeting:
    """The ranks of a group that have arrived, by their place along the axis; the results of each once all have."""

    arrived: dict[int, tuple[Eqn, Sequence[Array]]] = field(default_factory=dict)
    results: Sequence[Sequence[Array]] | None = None


class _Place:
    """Where the ranks of groups meet. `num_busy`: ranks that neither wait nor have left; at 0 nobody comes any more."""

    def __init__(self, num_ranks: int) -> None:
        self._changed = Condition()
        self._num_busy = num_ranks
        self._meetings: dict[_Group, _Meeting] = {}

    def meet(
        self, group: _Group, number: int, eqn: Eqn, operands: Sequence[Array]
    ) -> Sequence[Array]:
        """The results of one rank of a group, once all of it have come."""
        with self._changed:
            meeting = self._meetings.setdefault(group, _Meeting())
            meeting.arrived[number] = eqn, operands
            if len(meeting.arrived) == eqn.attrs["size"]:
                meeting.results = _evaluated(group, meeting)
                del self._meetings[group]
                self._num_busy += len(meeting.arrived) - 1
                self._changed.notify_all()
            else:
                self._num_busy -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: meeting.results is not None or self._num_busy <= 0)
            if meeting.results is None:
                axis, at = group
                raise _NobodyComesError(
                    f"{eqn.op.name} over {axis!r} ({eqn.source}): rank {number} waits for others of its group at {at}, "
                    "none of which comes: all ranks must run the same collectives in the same order"
                )
            return meeting.results[number]

    def leave(self) -> None:
        """One rank has ended."""
        with self._changed:
            self._num_busy -= 1
            self._changed.notify_all()


def _evaluated(group: _Group, meeting: _Meeting) -> Sequence[Sequence[Array]]:
    eqns = [meeting.arrived[number][0] for number in sorted(meeting.arrived)]
    for number, eqn in enumerate(eqns):
        if eqn is not eqns[0]:
            raise ExecutionError(
                f"over {group[0]!r}, rank {number} runs {eqn.op.name} ({eqn.source}) where rank 0 runs "
                f"{eqns[0].op.name} ({eqns[0].source}): all ranks must run the same collectives in the same order"
            )
    over_ranks = eqns[0].op.evaluate_ranks
    assert over_ranks is not None
    operands = [meeting.arrived[number][1] for number in sorted(meeting.arrived)]
    return over_ranks(operands, eqns[0].attrs)
