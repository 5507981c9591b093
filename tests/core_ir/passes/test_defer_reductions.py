"""defer_reductions: what is left out, what stays, and that the sum over ranks of what is left is what there was."""

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.ops.collective import all_reduce, wait
from plait.core_ir.ops.elementwise import add, mul, neg
from plait.core_ir.ops.shape import transpose
from plait.core_ir.passes.defer_reductions import defer_reductions
from plait.core_ir.types import TensorType, f32
from plait.core_ir.verify import verify

MESH = {"data": 2, "expert": 2}
X = TensorType(f32, (2, 3))


def reduced(b: Builder, x: object, axis: str, reduction: str = "sum") -> object:
    return b(wait, b(all_reduce, x, axis=axis, size=2, reduction=reduction))


def graph() -> Graph:
    b = Builder("joint")
    x, y = b.input(X, "batch", "x"), b.input(X, "batch", "y")
    through = b(transpose, reduced(b, x, "expert"), permutation=(1, 0))
    b.output(
        b(add, through, b(neg, b(transpose, reduced(b, y, "expert"), permutation=(1, 0)))),
        "param_grad",
        "sum",
    )
    b.output(reduced(b, reduced(b, b(mul, x, y), "data"), "expert"), "param_grad", "both")
    b.output(b(add, reduced(b, x, "expert"), y), "param_grad", "half")  # y is no sum
    b.output(b(add, reduced(b, x, "expert"), reduced(b, y, "data")), "param_grad", "unlike")
    b.output(reduced(b, x, "expert", "max"), "param_grad", "max")
    shared = reduced(b, y, "expert")
    b.output(shared, "param_grad", "shared")
    b.output(shared, "aux", "shared")
    return b.build()


def test_sums_are_left_to_the_end_of_the_step() -> None:
    before = graph()
    after, axes = defer_reductions(before)
    verify(after)
    assert axes == {"sum": ("expert",), "both": ("data", "expert")}
    assert (
        sum(eqn.op is all_reduce for eqn in before.eqns)
        - sum(eqn.op is all_reduce for eqn in after.eqns)
        == 4
    )
    rng = np.random.default_rng(0)
    operands = [[rng.normal(size=(2, 3)).astype("f") for _ in range(2)] for _ in range(4)]
    wanted = interpret_ranks(before, operands, MESH)
    found = np.array([[y.sum() for y in rank] for rank in interpret_ranks(after, operands, MESH)])
    names = [port.name for port in before.output_ports]
    for number, name in enumerate(names):
        of_ranks = np.array([rank[number].sum() for rank in wanted])
        grid = found[:, number].reshape(2, 2)
        for axis in axes.get(name, ()):
            place = list(MESH).index(axis)
            grid = np.broadcast_to(grid.sum(place, keepdims=True), (2, 2))
        np.testing.assert_allclose(grid.reshape(-1), of_ranks, rtol=1e-5, err_msg=name)


def test_a_graph_without_such_sums_stays() -> None:
    b = Builder("joint")
    x = b.input(X, "batch", "x")
    b.output(b(neg, x), "param_grad", "w")
    plain = b.build()
    assert defer_reductions(plain) == (plain, {})
