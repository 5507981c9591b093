"""Cut a task where what other stages wait for is ready, so that it can leave before the task ends.

    graph @pair(%g, %x)                              graph @pair.0(%g, %x) -> (%dx, %u)
        -> (%dx {gradient}, %y {activation},           the equations up to %dx
            %dw {param_grad}) {              ->      graph @pair.1(%u, ...) -> (%y, ...)
      ...                                              those behind, up to %y
    }                                                graph @pair.2(...) -> (%dw)

The order of equations stays: `overlap` puts what others wait for first. A part reads inputs of the task and values of
parts before it, and gives outputs of the task and values that parts behind it read; these may still be under way. A
collective whose value cannot be handed on so (`exchange_rows`) is waited for in the part that starts it.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.lanes import Seconds
from plait.core_ir.ops.collective import STARTS, wait
from plait.core_ir.passes.exchange_rows import exchange_rows, exchanges_rows, is_of_rows

LEAST_SHARE = 0.05
"""Of a task's time that must be left behind a cut, or the message waits for the end."""


@dataclass(frozen=True)
class Part:
    """One part of a task. Inputs of the whole task, then the results of all parts in order, are numbered from 0 on:
    `operands` are the numbers of what the part reads. `outputs` are the numbers of the task's outputs that are ready
    once it has run, with where each stands among the numbered."""

    graph: Graph
    operands: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]


def cut_at_messages(
    graph: Graph, messages: Sequence[Collection[int]], seconds: Seconds
) -> tuple[Part, ...]:
    """The parts of a task, in order; one where nothing can leave early.

    messages: for each, the numbers of the outputs that leave together. A task that gives an input back, or one value
    twice, stays whole: its compiler has to copy there.
    """
    whole = Part(
        graph,
        tuple(range(len(graph.inputs))),
        tuple((n, len(graph.inputs) + n) for n in range(len(graph.outputs))),
    )
    if len({*graph.inputs, *graph.outputs}) != len(graph.inputs) + len(graph.outputs):
        return (whole,)
    makers = {result: at for at, eqn in enumerate(graph.eqns) for result in eqn.results}
    left = [0.0]
    for eqn in reversed(graph.eqns):
        left.append(left[-1] + seconds(eqn))
    left.reverse()
    cuts = set()
    for message in messages:
        ready = 1 + max((makers.get(graph.outputs[n], -1) for n in message), default=-1)
        if 0 < ready and left[ready] > LEAST_SHARE * left[0]:
            cuts.add(ready)
    if not cuts:
        return (whole,)
    borders = [0, *sorted(cuts), len(graph.eqns)]
    runs = [graph.eqns[a:b] for a, b in itertools.pairwise(borders)]
    under_way = [start for start in _under_way(runs) if not is_of_rows(start)]
    if not under_way:
        return tuple(_parts(graph, runs))
    held = {start.result for start in under_way if not exchanges_rows(start)}
    eqns = tuple(itertools.chain.from_iterable(_waiting(runs, held)))
    moved = {start.result for start in under_way} - held
    return cut_at_messages(exchange_rows(replace(graph, eqns=eqns), moved), messages, seconds)


def _under_way(runs: Sequence[Sequence[Eqn]]) -> Iterator[Eqn]:
    """The collectives that end in a later run than they start."""
    for run in runs:
        starts = {eqn.result: eqn for eqn in run if eqn.op in STARTS}
        for eqn in run:
            if eqn.op is wait:
                starts.pop(eqn.operands[0], None)
        yield from starts.values()


def _waiting(runs: Sequence[Sequence[Eqn]], values: Collection[Value]) -> Iterator[list[Eqn]]:
    """The runs, each waiting for those of these values that it starts, before what ends it."""
    waits = {eqn.operands[0]: eqn for run in runs for eqn in run if eqn.op is wait}
    for run in runs:
        own = [waits[eqn.result] for eqn in run if eqn.op in STARTS and eqn.result in values]
        *others, last = (e for e in run if e.op is not wait or e.operands[0] not in values)
        yield [*others, *own, last]


def _parts(graph: Graph, runs: Sequence[Sequence[Eqn]]) -> Iterator[Part]:
    last_read = {value: at for at, run in enumerate(runs) for eqn in run for value in eqn.operands}
    numbers = {value: number for number, value in enumerate(graph.inputs)}
    pending = dict(enumerate(graph.outputs))
    for at, run in enumerate(runs):
        own = {result for eqn in run for result in eqn.results}
        reads = dict.fromkeys(v for eqn in run for v in eqn.operands if v not in own)
        is_output = set(pending.values())
        made = [
            result
            for eqn in run
            for result in eqn.results
            if result in is_output or last_read.get(result, at) > at
        ]
        operands = tuple(numbers[value] for value in reads)
        numbers |= {value: number for number, value in enumerate(made, len(numbers))}
        ready = {n: v for n, v in pending.items() if v in numbers}
        for number in ready:
            del pending[number]
        part = Graph(
            f"{graph.name}.{at}",
            tuple(reads),
            tuple(run),
            tuple(made),
            tuple(Port() for _ in reads),
            tuple(Port() for _ in made),
        )
        yield Part(part, operands, tuple((n, numbers[v]) for n, v in ready.items()))
