"""The text form: printing, parsing back to the same text, and errors that say where."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core_ir.build import Builder
from plait.core_ir.constants import load_constants, save_constants
from plait.core_ir.errors import TextError
from plait.core_ir.graph import Graph, Port, Source
from plait.core_ir.op import Literal
from plait.core_ir.ops import attention, control, elementwise, linalg, shape
from plait.core_ir.parse import parse_graph, parse_program
from plait.core_ir.program import Edge, Program, Stage
from plait.core_ir.text import constants_of, print_graph, print_program
from plait.core_ir.types import DTYPES, TensorType, f32, i32


def weight_gradient() -> Graph:
    b = Builder("stage1.weight_grad")
    g = b.input(TensorType(f32, (8, 512)), "handover", "g")
    x = b.input(TensorType(f32, (8, 128)), "residual", "x")
    dw = b(linalg.dot_general, x, g, batch=((), ()), contract=((0,), (0,)))
    b.output(dw, "param_grad", "layers.2.up.weight")
    return b.build()


def test_a_graph_prints_as_the_design_shows() -> None:
    assert print_graph(weight_gradient()) == (
        "plait.ir 1\n"
        "\n"
        'graph @stage1.weight_grad(%g: f32[8, 512] {handover "g"}, %x: f32[8, 128] {residual "x"})\n'
        '    -> (%0: f32[128, 512] {param_grad "layers.2.up.weight"}) {\n'
        "  %0: f32[128, 512] = dot_general(%x, %g) {batch=[[], []], contract=[[0], [0]]}\n"
        "}\n"
    )


def nested() -> Graph:
    body = Builder("body")
    c, x = body.input(TensorType(f32, (2,)), name="c"), body.input(TensorType(f32, (2,)), name="x")
    total = body(elementwise.add, c, x)
    body.output(total)
    body.output(total)
    b = Builder("outer graph")
    init = b.input(TensorType(f32, (2,)), "activation", "h")
    xs = b.input(TensorType(f32, (3, 2)), "batch", 'a "quoted" name')
    with b.at(Source("model.rnn", "net.py", 12)):
        carry, ys = b.emit(
            control.scan,
            init,
            xs,
            body=body.build(),
            num_consts=0,
            num_carry=1,
            length=3,
            reverse=True,
        )
    big = b.literal(np.arange(100, dtype=np.float32))
    b.output(carry, "loss")
    b.output(ys, "aux", "ys")
    b.output(big, "aux", "big")
    return b.build()


@pytest.mark.parametrize("build", [weight_gradient, nested])
def test_text_parses_back_to_the_same_text(build: object) -> None:
    graph = build()  # type: ignore[operator]
    text = print_graph(graph)
    assert print_graph(parse_graph(text, constants_of(graph))) == text


def test_sources_print_as_comments_on_request_and_are_not_read() -> None:
    graph = nested()
    text = print_graph(graph, source=True)
    assert "// model.rnn net.py:12" in text
    assert print_graph(parse_graph(text, constants_of(graph))) == print_graph(graph)


def test_a_large_constant_stands_in_a_table_by_content() -> None:
    graph = nested()
    (digest,) = constants_of(graph)
    assert f"f32[100]:#{digest}" in print_graph(graph)
    with pytest.raises(TextError, match=f"constant #{digest} is not in the table"):
        parse_graph(print_graph(graph))


@pytest.mark.parametrize("name", ["f32", "bf16", "f8e5m2", "bool", "c64", "i64"])
def test_a_table_of_constants_goes_to_a_file_and_back(name: str, tmp_path: Path) -> None:
    b = Builder("c")
    b.output(b.literal(np.arange(20).reshape(4, 5).astype(DTYPES[name].numpy)))
    graph = b.build()
    file = tmp_path / "constants.safetensors"
    save_constants(file, constants_of(graph))
    again = parse_graph(print_graph(graph), load_constants(file))
    assert again.eqns[0].attrs["value"] == graph.eqns[0].attrs["value"]


def test_a_file_of_constants_with_other_content_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "constants.safetensors"
    save_constants(file, {"0" * 32: np.arange(20)})
    with pytest.raises(TextError, match="other content than its hash says"):
        load_constants(file)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_of_every_dtype_come_back_bit_for_bit(name: str) -> None:
    dtype = DTYPES[name]
    if dtype.kind == "bool":
        array = np.array([True, False])
    elif dtype.is_integer:
        info = np.iinfo(str(dtype.numpy))
        array = np.array([info.min, info.max, 1], dtype.numpy)
    elif dtype.kind == "complex":
        array = np.array([1 + 2j, complex(-0.0, math.inf), 0.1j], dtype.numpy)
    else:
        array = np.array([0.1, -0.0, 1e-3, 448.0, 1.5], dtype.numpy)
    b = Builder("c")
    b.output(b.literal(array))
    graph = parse_graph(print_graph(b.build()))
    literal = graph.eqns[0].attrs["value"]
    assert literal == Literal(array)


@given(st.lists(st.floats(width=32), max_size=16))
def test_f32_constants_round_trip(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    b = Builder("c")
    b.output(b.literal(array))
    again = parse_graph(print_graph(b.build())).eqns[0].attrs["value"].array
    np.testing.assert_array_equal(again, array)
    assert np.array_equal(np.signbit(again), np.signbit(array)) or np.isnan(array).any()


@given(st.floats(allow_nan=False), st.text(max_size=8), st.integers())
def test_attributes_round_trip(number: float, text: str, integer: int) -> None:
    b = Builder("g")
    q = b.input(TensorType(f32, (1, 1, 1, 1)), "activation", text)
    out, lse = b.emit(attention.attention, q, q, q, causal=True, scale=number)
    results, spec = (TensorType(i32, ()),), json.dumps([text, integer])
    (y,) = b.emit(control.extern, out, target=f"torch:t{text}", results=results, spec=spec)
    for value in (y, lse):
        b.output(value)
    graph = b.build()
    printed = print_graph(graph)
    again = parse_graph(printed)
    assert [eqn.attrs for eqn in again.eqns] == [eqn.attrs for eqn in graph.eqns]
    assert again.input_ports[0] == Port("activation", text)
    assert print_graph(again) == printed


def test_names_are_quoted_where_needed_and_made_unique() -> None:
    b = Builder("g")
    x = b.input(TensorType(f32, ()), name="a b")
    y = b(elementwise.neg, x)
    y.name = "a b"
    b.output(y)
    text = print_graph(b.build())
    assert '%"a b": f32[]' in text
    assert '%"a b_0": f32[] = neg(%"a b")' in text
    assert print_graph(parse_graph(text)) == text


def program() -> Program:
    def stage(index: int) -> Stage:
        b = Builder(f"stage{index}.forward")
        x = b.input(TensorType(f32, (2,)), "activation" if index else "batch", f"h{index}")
        b.output(b(elementwise.neg, x), *(("loss", "") if index else ("activation", "out")))
        return Stage(index, {"F": b.build()})

    edge = Edge(0, Port("activation", "out"), 1, Port("activation", "h1"), "activation", 8)
    return Program("two", (stage(0), stage(1)), (edge,), ("a note",))


def test_a_program_parses_back_to_the_same_text() -> None:
    text = print_program(program())
    assert str(program()) == text
    again = parse_program(text)
    assert again.edges == program().edges
    assert print_program(again).splitlines()[2:] == [
        line for line in text.splitlines()[2:] if not line.startswith("//")
    ]


GOOD = print_graph(weight_gradient())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("plait.ir 1", "plait.ir 2", "line 1, column 1: expected the first line 'plait.ir 1'"),
        ("dot_general(", "dot_specific(", "line 5, column 23: unknown op 'dot_specific'"),
        ("%g)", "%q)", "line 5.*%q is not defined"),
        ("{handover", "{hangover", "line 3.*unknown port role 'hangover'"),
        ("f32[8, 512]", "f33[8, 512]", "line 3.*unknown dtype 'f33'"),
        ("contract=[[0], [0]]", "contract=[[1], [0]]", "line 5.*dot_general: C"),
        ("f32[128, 512] = dot", "f32[128, 51] = dot", "line 5.*dot_general gives"),
        ("}\n", "", "end of text"),
        ("(%x, %g)", "(%x ~ %g)", "line 5, column 38: unexpected character '~'"),
    ],
)
def test_malformed_text_names_line_and_column(before: str, after: str, message: str) -> None:
    assert before in GOOD
    with pytest.raises(TextError, match=message):
        parse_graph(GOOD.replace(before, after))


def test_a_name_defined_twice_is_an_error() -> None:
    text = GOOD.replace("  %0:", "  %g:")
    with pytest.raises(TextError, match="%g is defined twice"):
        parse_graph(text)


def test_bf16_numbers_print_exactly() -> None:
    b = Builder("c")
    b.output(b.literal(np.array(0.1, ml_dtypes.bfloat16)))
    assert "bf16[]:[0.10009765625]" in print_graph(b.build())


def test_shape_attributes_print_sorted() -> None:
    b = Builder("g")
    x = b.input(TensorType(f32, (2, 3)), name="x")
    b.output(b(shape.slice_, x, strides=(1, 1), limit=(2, 2), start=(0, 1)))
    assert "slice(%x) {limit=[2, 2], start=[0, 1], strides=[1, 1]}" in print_graph(b.build())
