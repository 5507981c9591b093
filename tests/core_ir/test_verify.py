"""The verifier finds each way in which a graph or a program can be malformed."""

from dataclasses import replace

import numpy as np
import pytest

from plait.core_ir.build import Builder
from plait.core_ir.errors import ExecutionError, TypeRuleError, VerifyError
from plait.core_ir.graph import Eqn, Graph, Port, Source, Value
from plait.core_ir.interpret import interpret
from plait.core_ir.ops import elementwise, shape
from plait.core_ir.program import Edge, Program, Stage
from plait.core_ir.types import TensorType, f32, f64, i32
from plait.core_ir.verify import verify, verify_program

X = TensorType(f32, (3,))


def chain(count: int = 2) -> Graph:
    b = Builder("chain")
    y = b.input(X, "activation", "x")
    for _ in range(count):
        y = b(elementwise.neg, y)
    b.output(y, "activation", "y")
    return b.build()


def test_a_good_graph_passes() -> None:
    graph = chain()
    assert verify(graph) is graph


def test_an_operand_used_before_its_definition() -> None:
    graph = chain()
    with pytest.raises(VerifyError, match=r"equation 0 \(neg.*not defined before it is used"):
        verify(replace(graph, eqns=graph.eqns[::-1]))


def test_an_undefined_output() -> None:
    graph = chain()
    with pytest.raises(VerifyError, match=r"output activation 'y'.*not defined"):
        verify(replace(graph, outputs=(Value(X),)))


def test_a_value_defined_twice() -> None:
    graph = chain()
    with pytest.raises(VerifyError, match="defined twice"):
        verify(replace(graph, eqns=(*graph.eqns, graph.eqns[0])))


def test_an_input_that_stands_twice() -> None:
    graph = chain()
    with pytest.raises(VerifyError, match="defined twice"):
        verify(replace(graph, inputs=graph.inputs * 2, input_ports=(Port(), Port())))


def test_a_wrong_result_type() -> None:
    x = Value(X)
    wrong = Value(TensorType(f64, (3,)))
    eqn = Eqn(elementwise.neg, (x,), {}, (wrong,), Source("net", "a.py", 3))
    with pytest.raises(VerifyError, match=r"neg, net a.py:3.*should be \[f32\[3\]\]"):
        verify(Graph("g", (x,), (eqn,), (wrong,)))


def test_a_broken_constraint_names_it_and_the_source() -> None:
    b = Builder("g")
    x, y = b.input(X), b.input(TensorType(i32, (3,)))
    with (
        b.at(Source("net.mlp", "net.py", 7)),
        pytest.raises(TypeRuleError, match=r"net.mlp net.py:7: add: C2: operands have one type"),
    ):
        b(elementwise.add, x, y)


def test_attributes_are_checked() -> None:
    b = Builder("g")
    x = b.input(X)
    with pytest.raises(TypeRuleError, match=r"reshape: attribute shape .* is missing"):
        b(shape.reshape, x)
    with pytest.raises(TypeRuleError, match="attribute shape must be a tuple of integers"):
        b(shape.reshape, x, shape=[3])
    with pytest.raises(TypeRuleError, match="no attribute 'size'"):
        b(shape.reshape, x, shape=(3,), size=3)


def test_two_ports_of_one_name() -> None:
    graph = chain()
    (y,) = graph.outputs
    port = Port("aux", "a")
    with pytest.raises(VerifyError, match="two outputs are aux 'a'"):
        verify(replace(graph, outputs=(y, y), output_ports=(port, port)))


def test_interpreting_checks_operands() -> None:
    with pytest.raises(ExecutionError, match=r"has type f32\[3\], got f64\[3\]"):
        interpret(chain(), [np.zeros(3)])
    with pytest.raises(ExecutionError, match="expected 1 operands, got 0"):
        interpret(chain(), [])


def two_stages() -> Program:
    first, second = Builder("f0"), Builder("f1")
    first.output(first(elementwise.neg, first.input(X, "batch", "x")), "activation", "h")
    second.output(second(elementwise.neg, second.input(X, "activation", "h")), "activation", "end")
    edge = Edge(0, Port("activation", "h"), 1, Port("activation", "h"), "activation", 12)
    stages = (Stage(0, {"F": first.build()}), Stage(1, {"F": second.build()}))
    return Program("p", stages, (edge,))


def test_a_program_with_a_port_that_nothing_writes() -> None:
    program = two_stages()
    assert verify_program(program) is program
    with pytest.raises(
        VerifyError, match="stage 1, task F: nothing writes its input activation 'h'"
    ):
        verify_program(replace(program, edges=()))


def test_an_edge_to_a_port_that_is_not_there() -> None:
    program = two_stages()
    edge = replace(program.edges[0], input=Port("activation", "q"))
    with pytest.raises(VerifyError, match="the target stage has no input activation 'q'"):
        verify_program(replace(program, edges=(edge,)))


def test_an_activation_that_goes_backwards() -> None:
    program = two_stages()
    edge = Edge(1, Port("activation", "end"), 0, Port("activation", "x"), "activation", 12)
    with pytest.raises(VerifyError, match=r"no input|earlier"):
        verify_program(replace(program, edges=(*program.edges, edge)))
