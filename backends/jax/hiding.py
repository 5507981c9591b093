"""What has to be computed before a `wait` ends its collective: the products that are to hide it.

XLA orders by what values are made of alone, so a wait stands behind a barrier with values that are made of these
products. Its simplifier drops what nothing reads behind a barrier: so they are values that something does read there.
A product that another collective sends, and nothing else reads, is in none; then a barrier in front of that start puts
it into one, which what is sent is made of itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import STARTS, wait
from plait.core_ir.passes.recomputed_products import is_product


@dataclass(frozen=True)
class Hiding:
    """before: for each wait the values that come through its barrier. beside: for some starts the value that comes
    through a barrier with what is sent."""

    before: Mapping[Eqn, tuple[Value, ...]]
    beside: Mapping[Eqn, Value]


def hiding(graph: Graph) -> Hiding:
    """How a graph keeps products between the starts and the waits between which they stand, as far as can be."""
    beside: dict[Eqn, Value] = {}
    for interval in _intervals(graph):
        made_of = interval.products(beside)
        missing = set().union(*made_of.values()) - _of(interval.last(made_of), made_of)
        for eqn in interval.eqns:
            if eqn.op in STARTS and made_of.get(eqn.operands[0], set()) & missing:
                value = _nearest(graph, eqn.operands[0], interval.read_behind)
                if value is not None:
                    beside[eqn] = value
    before = {i.end: i.last(i.products(beside)) for i in _intervals(graph)}
    return Hiding(before, beside)


_Products = dict[Value, set[Eqn]]
"""The products that each value is made of, the values in order."""


@dataclass(frozen=True)
class _Interval:
    """What stands between a start and its wait, `end`, and the values that are read behind it."""

    eqns: Sequence[Eqn]
    end: Eqn
    read_behind: Collection[Value]

    def products(self, beside: Mapping[Eqn, Value]) -> _Products:
        found: _Products = {}
        for eqn in self.eqns:
            own = {eqn} if is_product(eqn) else set()
            own.update(*(found.get(value, ()) for value in eqn.operands))
            if eqn in beside:
                found[beside[eqn]] = own | found.pop(beside[eqn], set())
            elif eqn.op is not wait and eqn.op not in STARTS:
                found.update(dict.fromkeys(eqn.results, own))
        return found

    def last(self, products: _Products) -> tuple[Value, ...]:
        """The last values that are read behind, and together are made of as many products as can be."""
        at_hand = [value for value in reversed(products) if value in self.read_behind]
        found: list[Value] = []
        for value in at_hand:
            if not products[value] <= _of(found, products):
                found.append(value)
        return tuple(found or at_hand[:1])


def _intervals(graph: Graph) -> Iterator[_Interval]:
    starts = {eqn.result: at for at, eqn in enumerate(graph.eqns) if eqn.op in STARTS}
    read_behind = set(graph.outputs)
    for at in range(len(graph.eqns) - 1, -1, -1):
        eqn = graph.eqns[at]
        if eqn.op is wait:
            start = starts.get(eqn.operands[0], -1)
            yield _Interval(graph.eqns[start + 1 : at], eqn, frozenset(read_behind))
        read_behind.update(eqn.operands)


def _of(values: Sequence[Value], products: _Products) -> set[Eqn]:
    return set().union(*(products[value] for value in values))


def _nearest(graph: Graph, value: Value, read_behind: Collection[Value]) -> Value | None:
    """The last of the values that a value is made of, without what came from other ranks, which is read behind."""
    made_of = {value}
    for eqn in reversed(graph.eqns):
        if made_of.isdisjoint(eqn.results) or eqn.op is wait:
            continue
        found = next((r for r in eqn.results if r in read_behind and r is not value), None)
        if found is not None:
            return found
        made_of.update(eqn.operands)
    return next((v for v in graph.inputs if v in made_of and v in read_behind), None)
