"""cut_at_messages: where a task is cut, and that its parts together mean what it means."""

from functools import partial

import numpy as np
from hypothesis import given, settings
from layered import layered
from test_overlap import cost, graphs

from plait.backends.parts import PartedTask
from plait.core_ir.graph import Graph
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Array
from plait.core_ir.parse import parse_graph
from plait.core_ir.passes.cut_at_messages import Part, cut_at_messages
from plait.core_ir.passes.multiplex import multiplex
from plait.core_ir.passes.overlap import overlap
from plait.core_ir.passes.pipeline import build_program
from plait.core_ir.verify import verify

TASK = """plait.ir 1

graph @task(%g: f32[3] {gradient "g"}, %x: f32[3] {residual "x"})
    -> (%dx: f32[3] {gradient "x"}, %dw: f32[3] {param_grad "w"}) {
  %t: f32[3] = tanh(%g)
  %dx: f32[3] = mul(%t, %x)
  %u: f32[3] = mul(%t, %t)
  %dw: f32[3] = mul(%u, %g)
}
"""


def run_parts(parts: tuple[Part, ...], operands: list[Array]) -> list[tuple[int, ...]]:
    """Which outputs are ready after each part."""
    tasks = tuple(partial(interpret, part.graph) for part in parts)
    return [tuple(sorted(ready)) for ready in PartedTask(parts, tasks).run(operands)]


def test_a_gradient_leaves_before_what_nobody_waits_for() -> None:
    graph = parse_graph(TASK)
    parts = cut_at_messages(graph, [[0]], cost)
    assert [[eqn.op.name for eqn in part.graph.eqns] for part in parts] == [
        ["tanh", "mul"],
        ["mul", "mul"],
    ]
    g, x = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    assert run_parts(parts, [g, x]) == [(0,), (1,)]
    # What the second part reads: tanh(g), which the first hands on, and g.
    assert [v.type.shape for v in parts[1].graph.inputs] == [(3,), (3,)]


def test_a_message_that_would_leave_at_the_end_cuts_nothing() -> None:
    graph = parse_graph(TASK)
    for messages in ([], [[]], [[1]], [[0, 1]]):
        (part,) = cut_at_messages(graph, messages, cost)
        assert part.graph is graph
    behind = {"mul": 0.0001, "tanh": 1.0}
    (part,) = cut_at_messages(graph, [[0]], lambda eqn: behind[eqn.op.name])
    assert part.graph is graph


def test_a_task_that_gives_an_input_or_a_value_twice_stays_whole() -> None:
    for change in (
        ("%dw: f32[3] {param_grad", "%x: f32[3] {param_grad"),
        ("%dw: f32[3] {param_grad", "%dx: f32[3] {param_grad"),
    ):
        graph = parse_graph(TASK.replace(*change))
        (part,) = cut_at_messages(graph, [[0]], cost)
        assert part.graph is graph


def test_a_pair_lets_its_gradient_and_its_activation_go() -> None:
    program = build_program(layered(3, 3), 3)
    forward, backward = program.task(1, "F"), program.task(1, "B")
    pair = overlap(multiplex(forward, backward), cost)
    leaves = [
        [n for n, p in enumerate(pair.output_ports) if p.role == role and p.name.startswith(half)]
        for half, role in (("backward", "gradient"), ("forward", "activation"))
    ]
    parts = cut_at_messages(pair, leaves, cost)
    assert len(parts) > 1
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=v.type.shape) for v in pair.inputs]
    ready = run_parts(parts, list(operands))
    assert set(leaves[0]) <= set(ready[0])
    check(pair, parts, operands)


def check(graph: Graph, parts: tuple[Part, ...], operands: list[Array]) -> None:
    tasks = tuple(partial(interpret, verify(part.graph)) for part in parts)
    found: dict[int, Array] = {}
    for ready in PartedTask(parts, tasks).run(list(operands)):
        assert not found.keys() & ready.keys()
        found.update(ready)
    wanted = interpret(graph, operands)
    assert sorted(found) == list(range(len(wanted)))
    for number, array in enumerate(wanted):
        assert found[number].tobytes() == array.tobytes()


@settings(max_examples=60, deadline=None)
@given(graphs(communicate=False))
def test_parts_of_any_graph_mean_what_it_means(graph: Graph) -> None:
    messages = [[n] for n, port in enumerate(graph.output_ports) if port.role == "activation"]
    parts = cut_at_messages(graph, messages, cost)
    rng = np.random.default_rng(0)
    check(graph, parts, [rng.normal(size=4).astype(np.float32) for _ in graph.inputs])
