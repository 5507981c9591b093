"""How long the values of a graph are read, and how long what is made of them is.

Positions are those of equations. Communication ends a trace: what comes from other ranks is made of nothing here.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import STARTS, wait


@dataclass(frozen=True)
class _Reader:
    """An equation that computes with a value. until: as of `Lifetimes.until`, of this and all later readers; heir: the
    first of them of which that much holds."""

    at: int
    until: float
    heir: int


class Lifetimes:
    """last_read: of each value, infinity for outputs, -1 where nothing reads it. longest: of what each computing
    equation gives, the result that counts; origin: of what a value is made of, the one that is read last, of several
    the nearest."""

    def __init__(self, graph: Graph) -> None:
        self.last_read: dict[Value, float] = dict.fromkeys(graph.inputs, -1)
        self.longest: dict[int, Value] = {}
        self.origin: dict[Value, Value] = {}
        self._readers: dict[Value, list[_Reader]] = {}
        for at, eqn in enumerate(graph.eqns):
            self.last_read.update(dict.fromkeys(eqn.results, -1))
            self.last_read.update(dict.fromkeys(eqn.operands, at))
        self.last_read.update(dict.fromkeys(graph.outputs, math.inf))
        for at in range(len(graph.eqns) - 1, -1, -1):
            if computes(graph.eqns[at]):
                self._look_back(at, graph.eqns[at])
        self._look_ahead(graph)

    def until(self, value: Value, since: int = -1) -> float:
        """How long a value, or something that is made of it behind a position, is read at least."""
        reader = self._first(value, since)
        return max(self.last_read[value], reader.until if reader else -1)

    def heir(self, value: Value, since: int = -1) -> int | None:
        """The first equation behind a position of which something is read no less long than the value, if any is."""
        reader = self._first(value, since)
        return reader.heir if reader and reader.until >= self.last_read[value] else None

    def _first(self, value: Value, since: int) -> _Reader | None:
        """The first that computes with the value behind a position."""
        readers = self._readers.get(value, [])  # the last one first
        number = bisect_left(readers, -since, key=lambda reader: -reader.at)
        return readers[number - 1] if number else None

    def _look_back(self, at: int, eqn: Eqn) -> None:
        self.longest[at] = max(reversed(eqn.results), key=self.until)
        until = self.until(self.longest[at])
        for value in dict.fromkeys(eqn.operands):
            readers = self._readers.setdefault(value, [])
            later = readers[-1] if readers else None
            if later is None or until >= later.until:
                readers.append(_Reader(at, until, at))
            else:
                readers.append(_Reader(at, later.until, later.heir))

    def _look_ahead(self, graph: Graph) -> None:
        made = dict.fromkeys(graph.inputs, -1)
        local = set(graph.inputs)
        for at, eqn in enumerate(graph.eqns):
            made.update(dict.fromkeys(eqn.results, at))
            if not computes(eqn):
                continue
            local.update(eqn.results)
            found = list(self._origins(eqn, local))
            if found:
                origin = max(found, key=lambda value: (self.last_read[value], made[value]))
                self.origin.update(dict.fromkeys(eqn.results, origin))

    def _origins(self, eqn: Eqn, local: set[Value]) -> Iterator[Value]:
        for value in eqn.operands:
            if value in local:
                yield value
            if value in self.origin:
                yield self.origin[value]


def computes(eqn: Eqn) -> bool:
    """Whether an equation is none of communication."""
    return eqn.op is not wait and eqn.op not in STARTS
