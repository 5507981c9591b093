"""Graphs on all ranks of a mesh at once; and what the text and the verifier say of collectives."""

from typing import Any

import numpy as np
import pytest

from plait.core_ir.build import Builder
from plait.core_ir.errors import ExecutionError, TextError, UsageError, VerifyError
from plait.core_ir.graph import Graph, Source
from plait.core_ir.interpret import interpret
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.parse import parse_graph
from plait.core_ir.text import print_graph
from plait.core_ir.verify import verify

TWO_AXES = """plait.ir 1

graph @two(%x: f32[2]) -> (%whole: f32[4], %sum: f32[2], %place: i32[]) {
  %g: async<f32[4]> = all_gather(%x) {axis="data", dim=0, size=2}
  %s: async<f32[2]> = all_reduce(%x) {axis="model", reduction="sum", size=3}
  %whole: f32[4] = wait(%g)
  %sum: f32[2] = wait(%s)
  %i: i32[] = axis_index() {axis="data", size=2}
  %three: i32[] = constant() {value=i32[]:[3]}
  %j: i32[] = axis_index() {axis="model", size=3}
  %row: i32[] = mul(%i, %three)
  %place: i32[] = add(%row, %j)
}
"""


def ranks(count: int, *shape: int) -> list[list[Any]]:
    return [[np.full(shape, r, np.float32)] for r in range(count)]


def graph(text: str) -> Graph:
    return verify(parse_graph(text))


def test_groups_differ_in_one_coordinate_and_ranks_count_row_major() -> None:
    out = interpret_ranks(graph(TWO_AXES), ranks(6, 2), {"data": 2, "model": 3})
    # Rank 3 i + j stands at data=i, model=j.
    for i in range(2):
        for j in range(3):
            whole, total, place = out[3 * i + j]
            assert whole.tolist() == [j, j, 3 + j, 3 + j]
            assert total.tolist() == [9.0 * i + 3] * 2
            assert place == 3 * i + j


def test_a_mesh_may_have_axes_that_the_graph_does_not_use() -> None:
    out = interpret_ranks(graph(TWO_AXES), ranks(12, 2), {"data": 2, "stage": 2, "model": 3})
    assert out[3][0].tolist() == [3, 3, 9, 9]  # data 0, stage 1, model 0


def test_a_group_of_one_is_interpreted_alone() -> None:
    text = TWO_AXES.replace("size=2", "size=1").replace("size=3", "size=1")
    alone = graph(text.replace("f32[4]", "f32[2]"))
    x = np.array([1, 2], np.float32)
    assert [a.tolist() for a in interpret(alone, [x])] == [[1, 2], [1, 2], 0]
    with pytest.raises(ExecutionError, match="interpret_ranks"):
        interpret(graph(TWO_AXES), [x])


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 2}, r"all_reduce over 'model'.*the mesh \{'data': 2\} has no such axis"),
        ({"data": 2, "model": 2}, r"over 'model'.* of 3 ranks; the mesh has 2"),
        ({"data": 2, "model": 3, "stage": 2}, "has 12 ranks, got operands of 6"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        interpret_ranks(graph(TWO_AXES), ranks(6, 2), mesh)


LOOP = """plait.ir 1

graph @loop(%x: f32[]) -> (%y: f32[]) {
  %y: f32[] = scan(%x) {body=
    graph @body(%c: f32[]) -> (%t: f32[]) {
      %s: async<f32[]> = all_reduce(%c) {axis="data", reduction="sum", size=2}
      %t: f32[] = wait(%s)
    }, length=3, num_carry=1, num_consts=0, reverse=false}
}
"""


def test_collectives_in_a_loop() -> None:
    out = interpret_ranks(graph(LOOP), [[np.float32(1)], [np.float32(2)]], {"data": 2})
    assert [float(y) for (y,) in out] == [12.0, 12.0]  # 3, then doubled twice


BRANCH = """plait.ir 1

graph @branch(%i: i32[], %x: f32[]) -> (%y: f32[]) {
  %y: f32[] = cond(%i, %x) {branches=[
    graph @same(%x: f32[]) -> (%x: f32[]) {
    },
    graph @sum(%x: f32[]) -> (%t: f32[]) {
      %s: async<f32[]> = all_reduce(%x) {axis="data", reduction="sum", size=2}
      %t: f32[] = wait(%s)
    }]}
}
"""


def test_a_group_may_take_another_branch_than_the_other_groups() -> None:
    which = (0, 0, 1, 1)  # by stage
    operands = [[np.int32(which[r]), np.float32(r)] for r in range(4)]
    out = interpret_ranks(graph(BRANCH), operands, {"stage": 2, "data": 2})
    assert [float(y) for (y,) in out] == [0, 1, 5, 5]


def test_ranks_of_one_group_that_part_are_an_error() -> None:
    operands = [[np.int32(r), np.float32(r)] for r in range(2)]
    with pytest.raises(ExecutionError, match=r"all_reduce over 'data'.*rank 1 waits for others"):
        interpret_ranks(graph(BRANCH), operands, {"data": 2})


def test_ranks_of_one_group_that_meet_in_two_collectives_are_an_error() -> None:
    other = BRANCH.replace(
        "graph @same(%x: f32[]) -> (%x: f32[]) {",
        """graph @most(%x: f32[]) -> (%t: f32[]) {
      %s: async<f32[]> = all_reduce(%x) {axis="data", reduction="max", size=2}
      %t: f32[] = wait(%s)""",
    )
    operands = [[np.int32(r), np.float32(r)] for r in range(2)]
    with pytest.raises(ExecutionError, match="same collectives in the same order"):
        interpret_ranks(graph(other), operands, {"data": 2})


def test_the_error_of_one_rank_is_raised_rather_than_that_others_wait() -> None:
    operands = [[np.int32(1), np.float32(1)], [np.int32(1), np.float64(1)]]
    with pytest.raises(ExecutionError, match=r"has type f32\[\], got f64\[\]"):
        interpret_ranks(graph(BRANCH), operands, {"data": 2})


# Text and verification.


@pytest.mark.parametrize("text", [TWO_AXES, LOOP, BRANCH])
def test_collectives_round_trip_as_text(text: str) -> None:
    printed = print_graph(parse_graph(text))
    assert print_graph(parse_graph(printed)) == printed
    assert "async<f32[" in printed


def test_async_of_async_is_no_type() -> None:
    with pytest.raises(TextError, match=r"line 4, column .*: unknown dtype 'async'"):
        parse_graph(TWO_AXES.replace("async<f32[4]>", "async<async<f32[4]>>"))


def start_only() -> tuple[Builder, Any, Any]:
    b = Builder("started")
    ops = {e.op.name: e.op for e in parse_graph(TWO_AXES).eqns}
    x = b.input(parse_graph(TWO_AXES).inputs[0].type)
    with b.at(Source("net", "net.py", 3)):
        started = b(ops["all_gather"], x, axis="data", dim=0, size=2)
    return b, started, ops["wait"]


def test_a_collective_that_nobody_waits_for() -> None:
    b, _, _ = start_only()
    with pytest.raises(VerifyError, match=r"all_gather \(net net.py:3\) is read 0 times; an async"):
        verify(b.build())


def test_a_collective_that_is_waited_for_twice() -> None:
    b, started, wait = start_only()
    for _ in range(2):
        b.output(b(wait, started))
    with pytest.raises(VerifyError, match="is read 2 times; an async value is read by exactly one"):
        verify(b.build())


def test_an_async_value_that_leaves_or_enters() -> None:
    b, started, _ = start_only()
    b.output(started)
    with pytest.raises(VerifyError, match=r"output .* is async; a collective is waited for in the"):
        verify(b.build())
    g = graph(TWO_AXES)
    with pytest.raises(VerifyError, match=r"input .* is async"):
        verify(Graph("late", (g.eqns[0].result,), g.eqns[2:3], ()))
