"""A graph in time on two lanes: what computes, one equation after the other, and what communicates beside it.

A collective's start takes no compute: it hands its work to the communication lane, which does one after the other in
the order of their starts. A `wait` stops the compute lane until its collective has ended; for how long is *exposed*
communication, the rest of it is hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import STARTS, wait

Seconds = Callable[[Eqn], float]
"""What an equation takes: computing, or of a collective's start on the communication lane."""


@dataclass(frozen=True)
class Lanes:
    """When a graph's equations run, in its order.

    start, end: of each equation on its lane; a wait's are when the compute lane stops for it and goes on.
    communication: the time of all collectives; exposed: how much of it the compute lane stood still for.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]
    communication: float
    exposed: float
    total: float

    @property
    def hidden(self) -> float:
        """Communication that compute ran beside."""
        return self.communication - self.exposed


def lanes(graph: Graph, seconds: Seconds) -> Lanes:
    """The graph in time in the order it has."""
    now = free = communication = exposed = 0.0
    ended: dict[Value, float] = {}
    start, end = [], []
    for eqn in graph.eqns:
        if eqn.op in STARTS:
            begun = max(now, free)
            free = ended[eqn.result] = begun + seconds(eqn)
            communication += seconds(eqn)
            start.append(begun)
            end.append(free)
            continue
        start.append(now)
        if eqn.op is wait:
            done = max(now, ended[eqn.operands[0]])
            exposed += done - now
            now = done
        else:
            now += seconds(eqn)
        end.append(now)
    return Lanes(tuple(start), tuple(end), communication, exposed, max(now, free))


class Live:
    """The bytes alive while equations run in any order: each buffer from its making to its last reader.

    Inputs are alive from the start, outputs to the end; a wait's result is the buffer that its start made.
    """

    def __init__(self, graph: Graph) -> None:
        self._buffer = {e.result: e.operands[0] for e in graph.eqns if e.op is wait}
        self._readers: dict[Value, int] = {}
        for value in (*graph.outputs, *(o for eqn in graph.eqns for o in eqn.operands)):
            self._readers[self._own(value)] = self._readers.get(self._own(value), 0) + 1
        self.now = self.peak = sum(v.type.num_bytes for v in graph.inputs)

    def _own(self, value: Value) -> Value:
        return self._buffer.get(value, value)

    def made(self, eqn: Eqn) -> int:
        """Bytes that running an equation takes on top."""
        return 0 if eqn.op is wait else sum(v.type.num_bytes for v in eqn.results)

    def freed(self, eqn: Eqn) -> int:
        """Bytes that nobody needs once it has run next."""
        reads: dict[Value, int] = {}
        for value in eqn.operands:
            reads[self._own(value)] = reads.get(self._own(value), 0) + 1
        unread = (v for v in eqn.results if eqn.op is not wait and v not in self._readers)
        return sum(v.type.num_bytes for v, n in reads.items() if self._readers[v] == n) + sum(
            v.type.num_bytes for v in unread
        )

    def run(self, eqn: Eqn) -> None:
        """Go on by one equation."""
        freed = self.freed(eqn)
        self.now += self.made(eqn)
        self.peak = max(self.peak, self.now)
        self.now -= freed
        for value in eqn.operands:
            self._readers[self._own(value)] -= 1


def peak_bytes(graph: Graph) -> int:
    """The most bytes alive at once in the order that the graph has."""
    live = Live(graph)
    for eqn in graph.eqns:
        live.run(eqn)
    return live.peak
