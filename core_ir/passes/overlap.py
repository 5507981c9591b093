"""Order equations so that communication hides behind compute: starts early, waits late, fillers in between.

    %h = all_to_all(%x)                  %h = all_to_all(%x)
    %y = wait(%h)                        %k = all_to_all(%u)
    %z = mul(%y, %y)             ->      %v = dot_general(%g, %r)      (needs neither: compute hides the first exchange)
    %k = all_to_all(%u)                  %y = wait(%h)
    %v = dot_general(%g, %r)             %z = mul(%y, %y)              (hides the second)

List scheduling on two lanes (`lanes`), one equation after the other. What is ready runs in this order: a collective's
start, at once; a wait whose collective has ended; the compute that the longest path to the end depends on, of what
somebody else waits for; then the fillers: equations that only weight gradients depend on. A wait that is not over comes
last of all. In the end every wait sinks to its first reader. Starts keep their order on each axis, effects theirs among
each other, but for halves that share no value: all ranks run one graph in one order, whichever it is.

Real times are not those of the model. So an order is also found for communication that takes a quarter of the compute,
where the model says less; of two that expose as little by its times, it is taken if it goes on hiding then.

Where nothing communicates the order stays, but for fillers, which go to the end: gradients and activations that other
stages wait for are ready first.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.lanes import Seconds, lanes
from plait.core_ir.ops.collective import STARTS, wait
from plait.core_ir.passes.equations import has_effect
from plait.core_ir.passes.live import Live, peak_bytes
from plait.core_ir.program import STEP_KINDS, Program, Stage

LEAST_SHARE = 0.25
"""Of the time of compute, that communication is taken to need if the model says less."""


def overlap(graph: Graph, seconds: Seconds, *, memory_bytes: int | None = None) -> Graph:
    """The graph in an order that exposes as little communication as was found, never more than the order it has.

    seconds: of an equation on its lane. memory_bytes: the most that may be alive at once, inputs and outputs counted;
    by default half more than in the given order. Raises `VerifyError` where even the given order needs more.
    """
    seconds = {eqn: seconds(eqn) for eqn in graph.eqns if eqn.op is not wait}.__getitem__
    given = peak_bytes(graph)
    limit = given + given // 2 if memory_bytes is None else memory_bytes
    longer = _longer(graph, seconds)
    candidates = [
        _Order(graph, times, bound).run()
        for times in (seconds, *longer)
        for bound in (limit, (given + limit) // 2)
    ]
    fitting = [found for found in (*candidates, graph) if peak_bytes(found) <= limit]
    if not fitting:
        raise VerifyError(
            f"graph {graph.name}: no order found keeps {limit} bytes alive at most; the least found is "
            f"{min(map(peak_bytes, (*candidates, graph)))}"
        )
    return min(fitting, key=lambda found: [_exposed(found, times) for times in (seconds, *longer)])


def _longer(graph: Graph, seconds: Seconds) -> tuple[Seconds, ...]:
    """Times with communication of LEAST_SHARE, where it is less."""
    communication = sum(seconds(eqn) for eqn in graph.eqns if eqn.op in STARTS)
    compute = sum(seconds(eqn) for eqn in graph.eqns if eqn.op not in (*STARTS, wait))
    if not 0 < communication < LEAST_SHARE * compute:
        return ()
    times = LEAST_SHARE * compute / communication
    return (lambda eqn: seconds(eqn) * (times if eqn.op in STARTS else 1.0),)


def _exposed(graph: Graph, seconds: Seconds) -> float:
    """The share of communication that is exposed, without what rounding adds."""
    found = lanes(graph, seconds)
    return round(found.exposed / found.communication, 6) if found.communication else 0.0


def overlap_tasks(program: Program, seconds: Seconds) -> Program:
    """The program with its tasks that communicate in that order, those of a step aside."""

    def ordered(kind: str, graph: Graph) -> Graph:
        communicates = any(eqn.op in STARTS for eqn in graph.eqns)
        return overlap(graph, seconds) if communicates and kind not in STEP_KINDS else graph

    stages = (
        Stage(stage.index, {kind: ordered(kind, task) for kind, task in stage.tasks.items()})
        for stage in program.stages
    )
    return replace(program, stages=tuple(stages))


def overlap_pairs(
    program: Program, pairs: Collection[tuple[int, int]], seconds: Seconds
) -> Program:
    """The program with its F&B tasks in that order."""
    ordered = {pair: overlap(graph, seconds) for pair, graph in program.pairs.items()}
    return replace(program, pairs=ordered)


def fillers(graph: Graph) -> frozenset[Eqn]:
    """Equations that weight gradients alone depend on: nobody else waits for them, on this rank or another."""
    needed = {
        value
        for port, value in zip(graph.output_ports, graph.outputs, strict=True)
        if port.role != "param_grad"
    }
    found = []
    for eqn in reversed(graph.eqns):
        if has_effect(eqn) or not needed.isdisjoint(eqn.results):
            needed.update(eqn.operands)
        else:
            found.append(eqn)
    return frozenset(found)


class _Order:
    """One run of list scheduling."""

    def __init__(self, graph: Graph, seconds: Seconds, limit: int) -> None:
        self._graph, self._seconds, self._limit = graph, seconds, limit
        self._before = dict(_before(graph))
        self._after: dict[int, list[int]] = {}
        for number, needs in self._before.items():
            for need in needs:
                self._after.setdefault(need, []).append(number)
        self._filler = fillers(graph)
        self._communicates = any(eqn.op in STARTS for eqn in graph.eqns)
        self._path = self._paths()

    def _paths(self) -> list[float]:
        """For each equation the time from its start to the end of all that depends on it."""
        path = [0.0] * len(self._graph.eqns)
        for number in range(len(path) - 1, -1, -1):
            rest = max((path[after] for after in self._after.get(number, ())), default=0.0)
            path[number] = rest + self._time(number)
        return path

    def _time(self, number: int) -> float:
        eqn = self._graph.eqns[number]
        return 0.0 if eqn.op is wait else self._seconds(eqn)

    def _rank(self, number: int) -> tuple[bool, float, int]:
        """What of the ready compute runs first."""
        is_filler = self._graph.eqns[number] in self._filler
        return is_filler, -self._path[number] if self._communicates else 0.0, number

    def run(self) -> Graph:
        eqns, live = self._graph.eqns, Live(self._graph)
        missing = {number: len(needs) for number, needs in self._before.items()}
        starts: list[int] = []
        compute: list[tuple[tuple[bool, float, int], int]] = []
        waits: list[tuple[float, int]] = []
        ended: dict[Value, float] = {}
        now = free = 0.0
        order: list[Eqn] = []

        def ready(number: int) -> None:
            eqn = eqns[number]
            if eqn.op in STARTS:
                heapq.heappush(starts, number)
            elif eqn.op is wait:
                heapq.heappush(waits, (ended[eqn.operands[0]], number))
            else:
                heapq.heappush(compute, (self._rank(number), number))

        for number, count in missing.items():
            if count == 0:
                ready(number)
        while len(order) < len(eqns):
            if starts and (self._fits(live, eqns[starts[0]]) or not (waits or compute)):
                number = heapq.heappop(starts)
                free = ended[eqns[number].result] = max(now, free) + self._seconds(eqns[number])
            elif waits and (waits[0][0] <= now or not compute):
                done, number = heapq.heappop(waits)
                now = max(now, done)
            else:
                number = self._take(compute, live)
                now += self._seconds(eqns[number])
            live.run(eqns[number])
            order.append(eqns[number])
            for after in self._after.get(number, ()):
                missing[after] -= 1
                if missing[after] == 0:
                    ready(after)
        return replace(self._graph, eqns=tuple(_sink_waits(order)))

    def _fits(self, live: Live, eqn: Eqn) -> bool:
        return live.now + live.made(eqn) <= self._limit

    def _take(self, compute: list[tuple[tuple[bool, float, int], int]], live: Live) -> int:
        """The first of the ready that fits; where none does, the one that leaves the least alive."""
        eqns = self._graph.eqns
        if self._fits(live, eqns[compute[0][1]]):
            return heapq.heappop(compute)[1]
        fitting = [entry for entry in compute if self._fits(live, eqns[entry[1]])]
        if fitting:
            entry = min(fitting)
        else:
            entry = min(compute, key=lambda e: (live.made(eqns[e[1]]) - live.freed(eqns[e[1]]), e))
        compute.remove(entry)
        heapq.heapify(compute)
        return entry[1]


def _sink_waits(order: Sequence[Eqn]) -> Iterator[Eqn]:
    """The same order, but each wait right before the first equation that reads it, or at the end."""
    held: dict[Value, Eqn] = {}
    for eqn in order:
        if eqn.op is wait:
            held[eqn.result] = eqn
            continue
        for value in dict.fromkeys(eqn.operands):
            if value in held:
                yield held.pop(value)
        yield eqn
    yield from held.values()


def _before(graph: Graph) -> Iterator[tuple[int, set[int]]]:
    """For each equation those that have to stand before it: what it reads, and order that has to stay."""
    makers: dict[Value, int] = {}
    last: dict[object, int] = {}
    half = _halves(graph)
    for number, eqn in enumerate(graph.eqns):
        needs = {makers[value] for value in eqn.operands if value in makers}
        key = _channel(eqn)
        if key is not None:
            key = (key, half[number])
            if key in last:
                needs.add(last[key])
            last[key] = number
        makers.update(dict.fromkeys(eqn.results, number))
        yield number, needs


def _halves(graph: Graph) -> list[int]:
    """A number for each equation, equal for two that share a value, directly or through others."""
    parent = list(range(len(graph.eqns)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    seen: dict[Value, int] = {}
    for number, eqn in enumerate(graph.eqns):
        for value in (*eqn.operands, *eqn.results):
            parent[root(seen.setdefault(value, number))] = root(number)
    return [root(number) for number in range(len(parent))]


def _channel(eqn: Eqn) -> object:
    """Equations of one channel keep their order; None for those of no channel."""
    if eqn.op in STARTS:
        return eqn.attrs["axis"]
    if eqn.op is wait or not has_effect(eqn):
        return None
    return has_effect
