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


def lanes(graph: Graph, seconds: Seconds, slowdown: float = 1.0) -> Lanes:
    """The graph in time in the order it has. While a collective runs, compute takes `slowdown` times as long."""
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
            now += slowed(seconds(eqn), free - now, slowdown)
        end.append(now)
    return Lanes(tuple(start), tuple(end), communication, exposed, max(now, free))


def describe(graph: Graph, found: Lanes) -> tuple[str, Callable[[Eqn], str]]:
    """What an order hides, in one line; and for each equation its lane with its times, in microseconds."""
    spans = {
        eqn: (begun * 1e6, done * 1e6)
        for eqn, begun, done in zip(graph.eqns, found.start, found.end, strict=True)
    }

    def span(eqn: Eqn) -> str:
        lane = eqn.attrs["axis"] if eqn.op in STARTS else "wait" if eqn.op is wait else "compute"
        return "{} {:.2f} .. {:.2f} us".format(lane, *spans[eqn])

    total, communication = found.total * 1e6, found.communication * 1e6
    return (
        f"{total:.2f} us; communication {communication:.2f} us, of which {found.hidden * 1e6:.2f} us are hidden and "
        f"{found.exposed * 1e6:.2f} us exposed",
        span,
    )


def slowed(work: float, busy: float, slowdown: float) -> float:
    """The time of `work` that takes `slowdown` times as long in the first `busy` seconds."""
    return min(work * slowdown, work + max(busy, 0.0) * (1 - 1 / slowdown))
