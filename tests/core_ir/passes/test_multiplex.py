"""multiplex: two graphs as one, with both calling conventions."""

from dataclasses import replace

import numpy as np
import pytest
from layered import layered

from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Graph, Port
from plait.core_ir.interpret import interpret
from plait.core_ir.parse import parse_graph, parse_program
from plait.core_ir.passes.multiplex import multiplex, multiplex_pairs
from plait.core_ir.passes.pipeline import build_program
from plait.core_ir.text import print_graph
from plait.core_ir.verify import verify, verify_program

FORWARD = """plait.ir 1

graph @m.stage1.forward(%w: f32[3] {param "w"}, %x: f32[3] {activation "0"})
    -> (%y: f32[3] {activation "1"}, %t: f32[3] {residual "t"}) {
  %t: f32[3] = mul(%w, %x)
  %y: f32[3] = tanh(%t)
}
"""
BACKWARD = """plait.ir 1

graph @m.stage0.backward(%w: f32[3] {param "w"}, %g: f32[3] {gradient "0"})
    -> (%dx: f32[3] {param_grad "w"}) {
  %dx: f32[3] = mul(%w, %g)
}
"""
PAIR = """plait.ir 1

graph @m.stage0.backward_m.stage1.forward(%w: f32[3] {param "backward.w"}, %g: f32[3] {gradient "backward.0"}, \
%w_0: f32[3] {param "forward.w"}, %x: f32[3] {activation "forward.0"})
    -> (%dx: f32[3] {param_grad "backward.w"}, %y: f32[3] {activation "forward.1"}, \
%t: f32[3] {residual "forward.t"}) {
  %dx: f32[3] = mul(%w, %g)
  %t: f32[3] = mul(%w_0, %x)
  %y: f32[3] = tanh(%t)
}
"""


def test_backward_then_forward() -> None:
    pair = multiplex(parse_graph(FORWARD), parse_graph(BACKWARD))
    assert print_graph(verify(pair)) == PAIR


def test_halves_that_share_values_because_they_are_alike() -> None:
    forward = parse_graph(FORWARD)
    pair = verify(multiplex(forward, forward))
    w, x, v, y = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    found = interpret(pair, [w, x, v, y])
    wanted = [np.tanh(w * x), w * x, np.tanh(v * y), v * y]
    for array, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-6)


def test_a_pair_of_a_program_means_both_halves() -> None:
    program = verify_program(multiplex_pairs(build_program(layered(3, 3), 3), [(2, 0), (1, 1)]))
    rng = np.random.default_rng(0)
    for (forward, backward), graph in program.pairs.items():
        halves = [program.task(backward, "B"), program.task(forward, "F")]
        operands = [[rng.normal(size=v.type.shape) for v in half.inputs] for half in halves]
        found = interpret(graph, operands[0] + operands[1])
        wanted = [
            array
            for half, own in zip(halves, operands, strict=True)
            for array in interpret(half, own)
        ]
        assert [a.tobytes() for a in found] == [a.tobytes() for a in wanted]


def test_pairs_of_a_program_are_text() -> None:
    built = replace(build_program(layered(3, 3), 3), notes=())
    program = multiplex_pairs(built, [(1, 0)])
    again = parse_program(str(program))
    assert str(again) == str(program)
    assert list(again.pairs) == [(1, 0)]
    wrong = parse_program(str(program).replace("pair 1 0 ", "pair 0 1 "))
    with pytest.raises(VerifyError, match="pair of stage 0's forward and stage 1's backward"):
        verify_program(wrong)


@pytest.mark.parametrize("dependent", ["forward", "backward"])
def test_a_true_dependency_is_an_error(dependent: str) -> None:
    made = parse_graph(FORWARD)
    reader = Graph(
        "reader", (made.outputs[0],), (), (made.outputs[0],), (Port("residual", "y"),), (Port(),)
    )
    halves = (reader, made) if dependent == "forward" else (made, reader)
    with pytest.raises(
        VerifyError, match=r"reader reads residual 'y' .*run them one after the other"
    ):
        multiplex(*halves)
