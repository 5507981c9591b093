"""Sums over ranks that hold the same become products; others stay."""

from collections.abc import Mapping

import numpy as np

from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Layout
from plait.core_ir.parse import parse_graph
from plait.core_ir.text import print_graph
from plait.core_ir.verify import verify
from plait.frontends.jax.replicated import reduce_locally

MODEL: Mapping[str, Layout] = {"w": (("model",),)}


def rewritten(body: str, layouts: Mapping[str, Layout]) -> str:
    """The equations of a graph of w and x after the pass, which computes the same."""
    graph = parse_graph(
        'plait.ir 1\n\ngraph @f(%w: f32[2] {param "w"}, %x: f32[2] {batch "x"})'
        f' -> (%y: f32[2] {{aux "y"}}) {{\n{body}\n}}\n'
    )
    after = verify(reduce_locally(graph, layouts))
    w, x = np.array([[1, 2], [3, 4]], "f4"), np.array([5, 6], "f4")
    ranks = [[w[rank if layouts else 0], x] for rank in range(2)]
    mesh = {"model": 2}
    for found, wanted in zip(
        interpret_ranks(after, ranks, mesh), interpret_ranks(graph, ranks, mesh), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    return print_graph(after)


def reduced(operand: str, reduction: str) -> str:
    return (
        f'  %s: async<f32[2]> = all_reduce({operand}) {{axis="model", reduction="{reduction}", size=2}}\n'
        "  %y: f32[2] = wait(%s)"
    )


def test_what_is_the_same_on_all_ranks_is_not_summed() -> None:
    text = rewritten(reduced("%x", "sum"), MODEL)
    assert "all_reduce" not in text
    assert "mul(" in text
    assert "all_reduce" not in rewritten(reduced("%w", "sum"), {})


def test_what_is_cut_is_summed() -> None:
    assert "all_reduce" in rewritten(reduced("%w", "sum"), MODEL)
    together = "  %t: f32[2] = add(%w, %x)\n" + reduced("%t", "sum")
    assert "all_reduce" in rewritten(together, MODEL)


def test_the_largest_of_equals_is_one_of_them_and_their_product_stays() -> None:
    text = rewritten(reduced("%x", "max"), MODEL)
    assert "all_reduce" not in text
    assert "mul(" not in text
    assert "all_reduce" in rewritten(reduced("%x", "product"), MODEL)


def test_a_sum_of_what_an_exchange_made_equal() -> None:
    gathered = (
        '  %g: async<f32[4]> = all_gather(%w) {axis="model", dim=0, size=2}\n'
        "  %a: f32[4] = wait(%g)\n"
        "  %h: f32[2] = slice(%a) {limit=[3], start=[1], strides=[1]}\n"
    )
    assert "all_reduce" not in rewritten(gathered + reduced("%h", "sum"), MODEL)
    moved = (
        '  %p: async<f32[2]> = permute(%x) {axis="model", pairs=[[0, 1]], size=2}\n'
        "  %q: f32[2] = wait(%p)\n"
    )
    assert "all_reduce" in rewritten(moved + reduced("%q", "sum"), MODEL)
    assert "all_reduce" in rewritten(
        '  %i: i32[] = axis_index() {axis="model", size=2}\n'
        "  %c: f32[] = convert(%i) {dtype=f32}\n"
        "  %b: f32[2] = broadcast(%c) {dims=[], shape=[2]}\n" + reduced("%b", "sum"),
        MODEL,
    )


def test_a_carry_varies_where_a_body_makes_it_vary() -> None:
    def loop(term: str) -> str:
        return (
            "  %y: f32[2] = scan(%w, %x) {body=\n"
            "    graph @body(%a: f32[2], %b: f32[2]) -> (%r: f32[2]) {\n"
            '      %s: async<f32[2]> = all_reduce(%b) {axis="model", reduction="sum", size=2}\n'
            "      %t: f32[2] = wait(%s)\n"
            f"      %r: f32[2] = add(%t, {term})\n"
            "    }, length=2, num_carry=1, num_consts=1, reverse=false}"
        )

    assert "all_reduce" in rewritten(loop("%a"), MODEL)
    assert "all_reduce" not in rewritten(loop("%b"), MODEL)
