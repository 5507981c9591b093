"""What has to be computed before a `wait` ends its collective: the products that are to hide it.

XLA orders by what values are made of alone, so a wait stands behind a barrier with values that are made of these
products. Its simplifier drops what nothing reads behind a barrier: so they are values that something does read there.
Each product has one such *keeper* at a time: its result, then the first that is made of the keeper before and is read
no less long. So one walk over the graph finds what comes through every barrier, however many collectives are under way.
What came through one barrier is made of all that did, and has one keeper from there on.

A product that another collective sends, and nothing else reads, has no keeper behind it; then a barrier in front of
that start puts it into a value that was made before and is read later, which keeps it from there on.
"""

from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from plait.backends.jax.lifetimes import Lifetimes, computes
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
    lifetimes, waits = Lifetimes(graph), _Waits(graph)
    kept, made = _Kept(lifetimes), _Made(lifetimes)
    before: dict[Eqn, tuple[Value, ...]] = {}
    beside: dict[Eqn, Value] = {}
    for at, eqn in enumerate(graph.eqns):
        if computes(eqn):
            kept.compute(at, is_product(eqn))
            made.add(at, eqn.results)
        elif eqn.op is wait:
            start = waits.start[at]
            before[eqn] = kept.join(start, at) or made.last(start, at)
        for value, product in kept.ended(at):
            origin = lifetimes.origin.get(value)
            if eqn.op not in STARTS or origin is None:
                continue
            if waits.are_ahead(at, product, lifetimes.last_read[origin]):
                beside[eqn] = origin
                kept.keep(product, (origin, at))
                made.add(at, (origin,))
    return Hiding(before, beside)


_Keeper: TypeAlias = tuple[Value, int]
"""A value, and a position: what is made of the value behind it is made of the products."""


@dataclass(eq=False)
class _Products:
    """Those of one keeper. at: the position of the last; keeper: None once others have them."""

    at: int
    keeper: _Keeper | None = None


class _Kept:
    """The keepers of the products so far, and when they are to leave them to an heir, or end without one."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._by_keeper: dict[_Keeper, _Products] = {}
        self._in_order: list[_Products] = []  # those of no keeper among them
        self._left: dict[int, list[_Keeper]] = defaultdict(list)
        self._ending: dict[float, list[_Keeper]] = defaultdict(list)

    def compute(self, at: int, is_product: bool) -> None:
        """An equation has what is left to it; if it is a product, itself too."""
        found = [self._by_keeper.pop(keeper, None) for keeper in self._left.pop(at, ())]
        products = [each for each in found if each is not None]
        if is_product:
            products.append(_Products(at))
            self._in_order.append(products[-1])
        value = self._lifetimes.longest[at]
        for each in products if self._lifetimes.last_read[value] > at else ():
            self.keep(each, (value, -1))

    def keep(self, products: _Products, keeper: _Keeper) -> None:
        """Give a keeper products of none."""
        value, since = keeper
        others = self._by_keeper.get(keeper)
        if others is None:
            heir = self._lifetimes.heir(value, since)
            if heir is not None:
                self._left[heir].append(keeper)
            else:
                self._ending[self._lifetimes.last_read[value]].append(keeper)
        elif others.at > products.at:
            products.keeper = None
            return
        else:
            others.keeper = None
        products.keeper = keeper
        self._by_keeper[keeper] = products

    def ended(self, at: int) -> list[tuple[Value, _Products]]:
        """The keepers that an equation reads last, with their products, which have none now."""
        ended = []
        for keeper in self._ending.pop(at, ()):
            products = self._by_keeper.pop(keeper, None)
            if products is not None:
                products.keeper = None
                ended.append((keeper[0], products))
        return ended

    def join(self, start: int, at: int) -> tuple[Value, ...]:
        """The keepers of products behind a start, the last first; one of them, once they have come through the barrier
        of a wait, has the products of all."""
        found: list[tuple[_Keeper, _Products]] = []
        while self._in_order and self._in_order[-1].at > start:
            products = self._in_order.pop()
            if products.keeper is not None:
                found.append((products.keeper, products))
        if not found:
            return ()
        for keeper, products in found:
            del self._by_keeper[keeper]
            products.keeper = None
        chosen = max((keeper[0] for keeper, _ in found), key=lambda value: self._reach(value, at))
        _, last = found[0]
        self._in_order.append(last)
        self.keep(last, (chosen, at))
        return tuple(dict.fromkeys(value for (value, _), _ in found))

    def _reach(self, value: Value, at: int) -> tuple[float, float]:
        """How long products can be kept by a value, by way of a start too; and without."""
        until = self._lifetimes.until(value, at)
        origin = self._lifetimes.origin.get(value)
        return max(until, self._lifetimes.last_read[origin] if origin else -1), until


class _Made:
    """What was computed so far and is still read, the last of it at the end."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._values: list[tuple[int, Value]] = []

    def add(self, at: int, values: Sequence[Value]) -> None:
        """What an equation gave."""
        self._values += [(at, value) for value in values]

    def last(self, start: int, at: int) -> tuple[Value, ...]:
        """The last that was computed behind a start and is read behind a wait, if anything is."""
        while self._values and self._lifetimes.last_read[self._values[-1][1]] <= at:
            self._values.pop()
        if not self._values or self._values[-1][0] <= start:
            return ()
        return (self._values[-1][1],)


class _Waits:
    """start: by the position of a wait, that of its start; -1 where the collective was started elsewhere."""

    def __init__(self, graph: Graph) -> None:
        starts: dict[Value, int] = {}
        self.start: dict[int, int] = {}
        for at, eqn in enumerate(graph.eqns):
            if eqn.op in STARTS:
                starts[eqn.result] = at
            elif eqn.op is wait:
                self.start[at] = starts.get(eqn.operands[0], -1)
        pairs = sorted((start, at) for at, start in self.start.items())
        self._positions = list(self.start)
        self._starts = [start for start, _ in pairs]
        self._last = list(accumulate((at for _, at in pairs), max))

    def are_ahead(self, at: int, products: _Products, until: float) -> bool:
        """Whether, behind a position, a wait is to come that products can hide, and another before `until`."""
        number = bisect_left(self._starts, products.at)
        if not number or self._last[number - 1] <= at:
            return False
        return until > self._positions[bisect(self._positions, at)]
