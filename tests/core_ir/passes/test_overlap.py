"""overlap: what the order hides, that it stays legal and within its memory, and what it means."""

import re
from collections.abc import Mapping

import networkx as nx
import numpy as np
import pytest
from collective_cases import HALF as EXPERTS
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.build import Builder
from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.lanes import Lanes, describe, lanes
from plait.core_ir.ops.collective import STARTS, all_to_all, permute, wait
from plait.core_ir.ops.elementwise import add, mul, tanh
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.parse import parse_graph
from plait.core_ir.passes.live import peak_bytes
from plait.core_ir.passes.multiplex import multiplex
from plait.core_ir.passes.overlap import fillers, overlap, overlap_tasks
from plait.core_ir.program import Program, Stage
from plait.core_ir.text import print_graph
from plait.core_ir.types import TensorType, f32
from plait.core_ir.verify import verify

COSTS: Mapping[object, float] = {dot_general: 4.0, all_to_all: 3.0, permute: 3.0}


def cost(eqn: Eqn) -> float:
    return COSTS.get(eqn.op, 1.0)


HALF = """plait.ir 1

graph @{name}(%x: f32[4, 4] {{activation "x"}}, %w: f32[4, 4] {{param "w"}}) -> (%z: f32[4, 4] {{{role} "y"}}) {{
  %a: f32[4, 4] = dot_general(%x, %w) {{batch=[[], []], contract=[[1], [0]]}}
  %h: async<f32[4, 4]> = all_to_all(%a) {{axis="expert", concat_dim=0, size=2, split_dim=0}}
  %b: f32[4, 4] = wait(%h)
  %z: f32[4, 4] = dot_general(%b, %w) {{batch=[[], []], contract=[[1], [0]]}}
}}
"""


TWO_PATHS = """plait.ir 1

graph @NAME(%x: f32[64, 64] {activation "x"}, %w: f32[64, 64] {param "w"}) -> (%z: f32[64, 64] {activation "y"}) {
  %h: async<f32[64, 64]> = all_to_all(%x) {axis="expert", concat_dim=0, size=2, split_dim=0}
  %b: f32[64, 64] = wait(%h)
  %a: f32[64, 64] = dot_general(%x, %w) {batch=[[], []], contract=[[1], [0]]}
  %z: f32[64, 64] = add(%a, %b)
}
"""


def halves() -> tuple[Graph, Graph]:
    forward = parse_graph(HALF.format(name="m.stage1.forward", role="activation"))
    backward = parse_graph(HALF.format(name="m.stage0.backward", role="gradient"))
    return forward, backward


def test_a_lone_chain_hides_nothing() -> None:
    forward, _ = halves()
    found = lanes(overlap(forward, cost), cost)
    assert (found.communication, found.exposed, found.hidden, found.total) == (3.0, 3.0, 0.0, 11.0)


def test_each_halfs_exchange_hides_behind_the_others_product() -> None:
    pair = multiplex(*halves())
    before = lanes(pair, cost)
    assert (before.exposed, before.total) == (6.0, 22.0)
    after = overlap(pair, cost)
    found = lanes(verify(after), cost)
    # By hand: product 0-4, its exchange 4-7 behind the other half's product 4-8, that one's 8-11 behind 8-12, 12-16.
    assert (found.communication, found.exposed, found.total) == (6.0, 0.0, 16.0)
    assert [eqn.op.name for eqn in after.eqns] == [
        *("dot_general", "all_to_all", "dot_general", "all_to_all"),
        *("wait", "dot_general", "wait", "dot_general"),
    ]
    for position, eqn in enumerate(after.eqns):
        if eqn.op in STARTS:
            end = next(i for i, e in enumerate(after.eqns) if e.operands[:1] == eqn.results)
            assert any(e.op is dot_general for e in after.eqns[position:end])
    assert print_graph(parse_graph(print_graph(after))) == print_graph(after)


@pytest.mark.parametrize("times", [1, 2, 4, 8, 16])
def test_what_hides_short_exchanges_hides_longer_ones_too(times: int) -> None:
    """Ordered by a model in which an elementwise equation hides an exchange, which a product hides in truth."""

    def model(eqn: Eqn) -> float:
        return {dot_general: 4.0, all_to_all: 0.1}.get(eqn.op, 0.2)

    def truth(eqn: Eqn) -> float:
        return model(eqn) * (times if eqn.op is all_to_all else 1)

    forward = parse_graph(EXPERTS.format(name="m.stage1.forward", role="activation"))
    backward = parse_graph(EXPERTS.format(name="m.stage0.backward", role="gradient"))
    found = lanes(overlap(multiplex(forward, backward), model), truth)
    assert found.exposed == pytest.approx(0.1 * times)  # the last one, behind which nothing is left


def test_weight_gradients_fill_the_gaps() -> None:
    b = Builder("backward")
    g = b.input(TensorType(f32, (4, 4)), "gradient", "g")
    x = b.input(TensorType(f32, (4, 4)), "residual", "x")
    w = b.input(TensorType(f32, (4, 4)), "param", "w")
    h = b(all_to_all, g, axis="expert", size=2, split_dim=0, concat_dim=0)
    got = b(wait, h)
    dx = b(mul, got, w)
    dw = b(dot_general, x, g, batch=((), ()), contract=((0,), (0,)))
    b.output(dx, "gradient", "dx")
    b.output(dw, "param_grad", "w")
    graph = b.build()
    assert {eqn.result for eqn in fillers(graph)} == {dw}
    after = overlap(graph, cost)
    assert [eqn.op for eqn in after.eqns] == [all_to_all, dot_general, wait, mul]
    assert lanes(after, cost).exposed == 0


def test_without_communication_only_fillers_move() -> None:
    b = Builder("backward")
    g = b.input(TensorType(f32, (4,)), "gradient", "g")
    dw = b(mul, g, g)
    t = b(tanh, g)
    dv = b(add, dw, t)
    dx = b(tanh, t)
    for value, role, name in (
        (dx, "gradient", "dx"),
        (dw, "param_grad", "w"),
        (dv, "param_grad", "v"),
    ):
        b.output(value, role, name)  # type: ignore[arg-type]
    graph = b.build()
    assert [eqn.result for eqn in overlap(graph, cost).eqns] == [t, dx, dw, dv]


def test_a_memory_bound_that_no_order_keeps_names_the_least() -> None:
    pair = multiplex(*halves())
    with pytest.raises(VerifyError, match=r"keeps 100 bytes alive at most; the least found is \d+"):
        overlap(pair, cost, memory_bytes=100)


@st.composite
def graphs(draw: st.DrawFn, *, communicate: bool = True) -> Graph:
    """Sums, products and exchanges over values made before, in any order."""
    b = Builder("random")
    values: list[Value] = [b.input(TensorType(f32, (4,)), "activation", str(n)) for n in range(2)]
    for _ in range(draw(st.integers(1, 25))):
        exchanges = [permute, all_to_all] if communicate else []
        op = draw(st.sampled_from([add, mul, tanh, *exchanges]))
        x, y = (draw(st.sampled_from(values)) for _ in range(2))
        axis = draw(st.sampled_from(["expert", "data"]))
        if op is permute:
            values.append(b(wait, b(op, x, axis=axis, size=2, pairs=((0, 1), (1, 0)))))
        elif op is all_to_all:
            values.append(b(wait, b(op, x, axis=axis, size=2, split_dim=0, concat_dim=0)))
        else:
            values.append(b(op, x) if op is tanh else b(op, x, y))
    chosen = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True))
    roles = draw(st.lists(st.sampled_from(["activation", "param_grad"]), min_size=4, max_size=4))
    for number, (value, role) in enumerate(zip(chosen, roles, strict=False)):
        b.output(value, role, str(number))  # type: ignore[arg-type]
    return b.build()


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 10))
def test_any_graph_keeps_its_meaning_its_order_and_its_memory(graph: Graph, slack: int) -> None:
    limit = peak_bytes(graph) + 16 * slack
    after = verify(overlap(graph, cost, memory_bytes=limit))
    assert peak_bytes(after) <= limit
    assert lanes(after, cost).exposed <= lanes(graph, cost).exposed
    assert set(after.eqns) == set(graph.eqns)
    for axis in ("expert", "data"):
        for half in _connected(graph):
            assert _starts(after, axis, half) == _starts(graph, axis, half)
    rng = np.random.default_rng(0)
    operands = [[rng.normal(size=4).astype(np.float32) for _ in graph.inputs] for _ in range(4)]
    mesh = {"expert": 2, "data": 2}
    found, wanted = (interpret_ranks(g, operands, mesh) for g in (after, graph))
    for got, want in zip(found, wanted, strict=True):
        assert [a.tobytes() for a in got] == [a.tobytes() for a in want]


def _starts(graph: Graph, axis: str, half: set[Eqn]) -> list[Eqn]:
    return [e for e in graph.eqns if e.op in STARTS and e.attrs["axis"] == axis and e in half]


def _connected(graph: Graph) -> list[set[Eqn]]:
    """Equations that share values, directly or through others."""
    links = nx.Graph()
    for eqn in graph.eqns:
        links.add_edges_from((eqn, value) for value in (*eqn.operands, *eqn.results))
    return [{n for n in part if isinstance(n, Eqn)} for part in nx.connected_components(links)]


def test_lanes_by_hand() -> None:
    b = Builder("hand")
    x = b.input(TensorType(f32, (4,)), "activation", "x")
    first = b(all_to_all, x, axis="expert", size=2, split_dim=0, concat_dim=0)
    second = b(all_to_all, x, axis="expert", size=2, split_dim=0, concat_dim=0)
    t = b(tanh, x)
    one = b(wait, first)
    two = b(wait, second)
    b.output(b(add, b(add, one, two), t), "activation", "y")
    graph = b.build()
    # Exchanges 0-3 and 3-6, tanh 0-1, waits until 3 and until 6, two sums until 8.
    assert lanes(graph, cost) == Lanes(
        start=(0.0, 3.0, 0.0, 1.0, 3.0, 6.0, 7.0),
        end=(3.0, 6.0, 1.0, 3.0, 6.0, 7.0, 8.0),
        communication=6.0,
        exposed=5.0,
        total=8.0,
    )
    # x, two exchanges and tanh, each of 16 bytes; then x is gone, and a sum stands beside the other three.
    assert peak_bytes(graph) == 64


def test_lanes_are_shown_behind_equations() -> None:
    ordered = overlap(multiplex(*halves()), cost)
    summary, comment = describe(ordered, lanes(ordered, cost))
    found = lanes(ordered, cost)
    assert summary == (
        f"{found.total * 1e6:.2f} us; communication 6000000.00 us, of which {found.hidden * 1e6:.2f} us are hidden and "
        f"{found.exposed * 1e6:.2f} us exposed"
    )
    text = print_graph(ordered, comment=comment)
    starts = [line for line in text.splitlines() if "= all_to_all(" in line]
    assert [re.sub(r".*// ", "", line) for line in starts] == [
        "expert 4000000.00 .. 7000000.00 us",
        "expert 8000000.00 .. 11000000.00 us",
    ]
    assert print_graph(parse_graph(text)) == print_graph(ordered)


def test_tasks_that_communicate_are_ordered_and_others_stay() -> None:
    forward = parse_graph(TWO_PATHS.replace("NAME", "m.stage0.forward"))
    plain = parse_graph(
        'plait.ir 1\n\ngraph @m.stage0.backward(%g: f32[4] {gradient "y"}) -> (%d: f32[4] {param_grad "w"}) {\n'
        "  %d: f32[4] = tanh(%g)\n}\n"
    )
    program = Program("m", (Stage(0, {"F": forward, "B": plain}),), ())
    stage = overlap_tasks(program, cost).stages[0]
    assert stage.tasks["B"] is plain
    names = [eqn.op.name for eqn in stage.tasks["F"].eqns]
    assert names == ["all_to_all", "dot_general", "wait", "add"]
