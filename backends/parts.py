"""A task in parts, each compiled by itself: what is ready after one part can leave before the next one runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from plait.core_ir.cost import eqn_seconds
from plait.core_ir.graph import Graph
from plait.core_ir.passes.cut_at_messages import Part, cut_at_messages
from plait.core_ir.program import EdgeKind, Program

Task: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""A compiled task graph: arrays in the order of its inputs -> those of its outputs. It may empty the list."""


@dataclass(frozen=True)
class PartedTask:
    """A task as its parts, in order, and each part compiled.

    messages: for each, the numbers of the outputs that leave together; of a pair the backward's, then the forward's.
    """

    parts: tuple[Part, ...]
    tasks: tuple[Task, ...]
    messages: tuple[frozenset[int], ...] = ()

    @cached_property
    def _last_use(self) -> dict[int, int]:
        """The last part that reads each numbered value, or gives it as an output."""
        return {
            number: at
            for at, part in enumerate(self.parts)
            for number in (*part.operands, *(place for _, place in part.outputs))
        }

    def run(self, operands: list[Any]) -> Iterator[Mapping[int, Any]]:
        """Run part after part; after each, the outputs of the task that are ready by then. Empties the list."""
        values = dict(enumerate(operands))
        operands.clear()
        made = len(values)
        for at, (part, task) in enumerate(zip(self.parts, self.tasks, strict=True)):
            values = {n: v for n, v in values.items() if self._last_use.get(n, -1) >= at}
            own = [values.pop(n) if self._last_use[n] == at else values[n] for n in part.operands]
            results = task(own)
            values.update(enumerate(results, made))
            made += len(results)
            yield {number: values[place] for number, place in part.outputs}


def parted_pair(
    program: Program, pair: tuple[int, int], compile_one: Callable[[Graph], Task]
) -> PartedTask:
    """The F&B task of a pair in its parts."""
    parts, messages = cut_pair(program, pair)
    return PartedTask(parts, tuple(compile_one(part.graph) for part in parts), messages)


def cut_pair(
    program: Program, pair: tuple[int, int]
) -> tuple[tuple[Part, ...], tuple[frozenset[int], ...]]:
    """The F&B task of a pair, cut where the gradient, and where the activation, can leave; and these messages."""
    forward, backward = pair
    graph, before = program.pairs[pair], len(program.task(backward, "B").outputs)
    messages = (
        _sent(program, backward, "gradient", 0),
        _sent(program, forward, "activation", before),
    )
    return cut_at_messages(graph, messages, eqn_seconds), messages


def pairs_here(program: Program, stages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The pairs of stages that run here."""
    here = set(stages)
    return (pair for pair in program.pairs if here.issuperset(pair))


def _sent(program: Program, stage: int, kind: EdgeKind, offset: int) -> frozenset[int]:
    """The numbers of the outputs that leave a stage."""
    graph = program.task(stage, "F" if kind == "activation" else "B")
    ports = {edge.output for edge in program.edges_from(stage, kind)}
    return frozenset(offset + n for n, port in enumerate(graph.output_ports) if port in ports)
