"""What comes through barriers on random graphs, against the plain meaning; and how many steps finding it takes."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.jax import hiding as hiding_module
from plait.backends.jax import lifetimes
from plait.backends.jax.hiding import Hiding, hiding
from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops import elementwise, linalg
from plait.core_ir.ops.collective import STARTS, all_to_all, wait
from plait.core_ir.types import TensorType, f32

TYPE = TensorType(f32, (4, 4))
FILES = {hiding_module.__file__, lifetimes.__file__}


class Program:
    """A graph in the making: products, equations of one operand or two, collectives."""

    def __init__(self) -> None:
        self.b = Builder("t")
        self.values = [self.b.input(TYPE, "activation", f"x{n}") for n in range(3)]
        self.started: list[Value] = []

    def product(self, x: Value, y: Value) -> Value:
        result = self.b(linalg.dot_general, x, y, batch=((), ()), contract=((1,), (0,)))
        self.values.append(result)
        return result

    def add(self, x: Value, y: Value) -> Value:
        self.values.append(self.b(elementwise.add, x, y))
        return self.values[-1]

    def start(self, x: Value) -> None:
        options = {"axis": "e", "size": 2, "split_dim": 0, "concat_dim": 0}
        self.started.append(self.b(all_to_all, x, **options))

    def wait(self, number: int) -> Value:
        self.values.append(self.b(wait, self.started.pop(number)))
        return self.values[-1]

    def build(self, outputs: Sequence[Value]) -> Graph:
        for number, value in enumerate(dict.fromkeys(outputs)):
            self.b.output(value, "activation", f"y{number}")
        return self.b.build()


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    program = Program()

    def any_value() -> Value:
        last = len(program.values) - 1
        return program.values[last - draw(st.integers(0, min(last, 12)))]

    for _ in range(draw(st.integers(3, 40))):
        match draw(st.sampled_from(("product", "product", "add", "add", "start", "wait"))):
            case "product":
                program.product(any_value(), any_value())
            case "add":
                program.add(any_value(), any_value())
            case "start":
                program.start(any_value())
            case "wait" if program.started:
                program.wait(draw(st.integers(0, len(program.started) - 1)))
    while program.started:
        program.wait(0)
    outputs = draw(st.lists(st.sampled_from(program.values), min_size=1, max_size=6))
    return program.build(outputs)


Products = set[Eqn]


def between(graph: Graph, end: Eqn) -> Sequence[Eqn]:
    """What stands between a wait and its start."""
    at = graph.eqns.index(end)
    start = next(n for n, eqn in enumerate(graph.eqns) if end.operands[0] in eqn.results)
    return graph.eqns[start + 1 : at]


def read_behind(graph: Graph, end: Eqn) -> set[Value]:
    later = graph.eqns[graph.eqns.index(end) + 1 :]
    return {*graph.outputs, *(value for eqn in later for value in eqn.operands)}


def can_be_kept(graph: Graph, end: Eqn) -> Products:
    """The products between a wait and its start that something which is read behind the wait is made of."""
    made_of: dict[Value, Products] = {}
    for eqn in between(graph, end):
        if eqn.op is not wait and eqn.op not in STARTS:
            made_of.update(dict.fromkeys(eqn.results, own(eqn, made_of)))
    return set().union(*(made_of.get(value, set()) for value in read_behind(graph, end)))


def own(eqn: Eqn, made_of: Mapping[Value, Products]) -> Products:
    products = {eqn} if eqn.op is linalg.dot_general else set()
    return products.union(*(made_of.get(value, set()) for value in eqn.operands))


def are_kept(graph: Graph, found: Hiding) -> Iterator[tuple[Eqn, Products]]:
    """For each wait all products that have to be there before it ends, as the graph runs with barriers: a value that
    came through one is made of all that did."""
    made_of: dict[Value, Products] = {}
    for eqn in graph.eqns:
        if eqn.op is wait or eqn in found.beside:
            values = found.before[eqn] if eqn.op is wait else (found.beside[eqn], *eqn.operands)
            joined: Products = set().union(*(made_of.get(value, set()) for value in values))
            made_of.update(dict.fromkeys(values, joined))
            if eqn.op is wait:
                yield eqn, joined
        elif eqn.op not in STARTS:
            made_of.update(dict.fromkeys(eqn.results, own(eqn, made_of)))


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_every_product_that_can_be_kept_is(graph: Graph) -> None:
    found = hiding(graph)
    for end, products in are_kept(graph, found):
        assert products >= can_be_kept(graph, end)


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_what_comes_through_is_there_and_is_read_behind(graph: Graph) -> None:
    found = hiding(graph)
    at_hand = set(graph.inputs)
    for eqn in graph.eqns:
        through = found.before.get(eqn, ())
        if eqn in found.beside:
            through = (*through, found.beside[eqn])
        assert len(set(through)) == len(through)
        assert {*through} <= at_hand & read_behind(graph, eqn)
        at_hand.update(eqn.results)
    products = sum(eqn.op is linalg.dot_general for eqn in graph.eqns)
    waits = sum(eqn.op is wait for eqn in graph.eqns)
    assert sum(map(len, found.before.values())) <= products + waits


def test_without_products_the_last_that_was_computed_comes_through() -> None:
    program = Program()
    x, y, z = program.values
    program.start(x)
    first = program.add(x, y)
    second = program.add(first, z)
    program.add(second, second)  # nothing reads it
    ended = program.wait(0)
    found = hiding(program.build([program.add(second, ended), first]))
    assert [*found.before.values()] == [(second,)]


# Steps.


def started_first(n: int) -> Graph:
    """All collectives are under way from the start, and each layer waits for its own."""
    program = Program()
    x, w, _ = program.values
    for _ in range(n):
        program.start(w)
    for _ in range(n):
        x = program.product(program.add(x, program.wait(0)), w)
    return program.build([x])


def ended_last_first(n: int) -> Graph:
    program = Program()
    x, w, _ = program.values
    for _ in range(n):
        x = program.product(x, w)
        program.start(x)
    for _ in range(n):
        x = program.add(program.product(x, w), program.wait(-1))
    return program.build([x])


def all_kept(n: int) -> Graph:
    """As a forward keeps what its backward is to read."""
    program = Program()
    x, w, _ = program.values
    for _ in range(n):
        program.start(x)
        x = program.product(x, w)
        y = program.product(x, x)
        program.add(x, y)
        program.wait(0)
    return program.build(program.values)


def two_at_once(n: int) -> Graph:
    """Halves that share nothing, each of which sends a product that nothing else reads."""
    program = Program()
    x, y, w = program.values
    for _ in range(n):
        program.start(program.product(x, w))
        y = program.product(y, program.add(y, w))
        x = program.add(x, program.wait(0))
        program.start(program.product(y, w))
        x = program.product(x, program.add(x, w))
        y = program.add(y, program.wait(0))
    return program.build([x, y])


@pytest.mark.parametrize("family", [started_first, ended_last_first, all_kept, two_at_once])
def test_steps_grow_as_the_graph_does(family: Callable[[int], Graph]) -> None:
    small, large = (num_steps(family(n)) for n in (60, 240))
    assert large < 4.4 * small


def num_steps(graph: Graph) -> int:
    """The lines that run."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        code: CodeType = frame.f_code
        return line if code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        hiding(graph)
    finally:
        sys.settrace(before)
    return count
