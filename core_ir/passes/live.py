"""The bytes that a graph keeps alive, in the order that it has or in one that is being made."""

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import wait


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
