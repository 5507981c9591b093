"""split_backward: what stands in I, what in W, what is handed over."""

from collections import Counter

import numpy as np
import pytest
from joint_programs import cut, differentiate, matmul, matrix, run_program, total
from test_partition_stages import cut_and_check, edges, ops

from plait.core_ir.build import Builder
from plait.core_ir.cost import eqn_flops
from plait.core_ir.graph import Graph, Value
from plait.core_ir.ops.control import boundary, cond, extern, scan
from plait.core_ir.ops.elementwise import add, logistic, mul, sub, tanh
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.split_backward import split_backward
from plait.core_ir.program import Program
from plait.core_ir.types import TensorType, f64, i32
from plait.core_ir.verify import verify, verify_program


def gated_mlp(num_layers: int) -> Graph:
    """(silu(x w1) * (x w3)) w2, layer by layer, one stage each; gradients as JAX writes them."""
    b = Builder("mlp")
    h = matrix(b, "batch", "x", 2, 4)
    params: dict[str, Value] = {}
    layers = []
    for index in range(num_layers):
        w = [matrix(b, "param", f"{index}.{n}", *shape) for n, shape in _SHAPES.items()]
        params |= {f"{index}.{n}": v for n, v in zip(_SHAPES, w, strict=True)}
        if index:
            (h,) = cut(b, index - 1, h)
        gate, up = matmul(b, h, w[0]), matmul(b, h, w[2])
        s = b(logistic, gate)
        silu = b(mul, gate, s)
        hidden = b(mul, silu, up)
        layers.append((h, w, gate, s, silu, up, hidden))
        h = matmul(b, hidden, w[1])
    b.output(total(b, h), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), h.type.shape)
    grads: dict[str, Value] = {}
    for index, (x, w, gate, s, silu, up, hidden) in reversed(list(enumerate(layers))):
        grads[f"{index}.w2"] = _tn(b, hidden, g)
        dh = _nt(b, g, w[1])
        dup, dsilu = b(mul, dh, silu), b(mul, dh, up)
        one = b.full(s.type, 1.0)
        slope = b(mul, s, b(sub, one, s))
        dgate = b(add, b(mul, dsilu, s), b(mul, b(mul, dsilu, gate), slope))
        grads[f"{index}.w1"], grads[f"{index}.w3"] = _tn(b, x, dgate), _tn(b, x, dup)
        g = b(add, _nt(b, dup, w[2]), _nt(b, dgate, w[0]))
        if index:
            (g,) = b.emit(boundary, g, index=index - 1, backward=True)
    for name in params:
        b.output(grads[name], "param_grad", name)
    return b.build()


_SHAPES = {"w1": (4, 8), "w2": (8, 4), "w3": (4, 8)}


def _tn(b: Builder, x: Value, g: Value) -> Value:
    return b(dot_general, x, g, batch=((), ()), contract=((0,), (0,)))


def _nt(b: Builder, g: Value, w: Value) -> Value:
    return b(dot_general, g, w, batch=((), ()), contract=((1,), (1,)))


def types(program: Program, stage: int, role: str) -> list[tuple[int, ...]]:
    """Shapes of what I hands over, or F keeps."""
    kind = "I" if role == "handover" else "F"
    return [v.type.shape for _, v in program.task(stage, kind).outputs_of(role)]  # type: ignore[arg-type]


def test_the_gated_mlp_has_three_products_in_each_part() -> None:
    program = cut_and_check(gated_mlp(3), 3)
    for stage in (1, 2):
        assert Counter(ops(program, stage, "I"))["dot_general"] == 3
        (gradient,) = [v for _, v in program.task(stage, "I").outputs_of("gradient")]
        (last,) = [e for e in program.task(stage, "I").eqns if e.result is gradient]
        assert last.op is add  # of the paths through gate and up
    for stage in range(3):
        costly = [e.op for e in program.task(stage, "W").eqns if eqn_flops(e)]
        assert costly == [dot_general] * 3
        products = [shape for shape in types(program, stage, "handover") if shape == (2, 8)]
        assert len(products) == 2
    assert Counter(ops(program, 0, "I"))["dot_general"] == 1


def test_no_costly_equation_stands_in_both_parts() -> None:
    program = cut_and_check(gated_mlp(3), 3)
    for stage in program.stages:
        in_both = {e for e in stage.tasks["I"].eqns} & {e for e in stage.tasks["W"].eqns}
        assert all(eqn_flops(e) == 0 for e in in_both)
        total_products = sum(
            ops(program, stage.index, kind).count("dot_general")  # type: ignore[arg-type]
            for kind in ("I", "W")
        )
        assert total_products == ops(program, stage.index, "B").count("dot_general")


@pytest.mark.parametrize("num_uses", [2, 3])
@pytest.mark.parametrize("residual", [False, True])
def test_r01_a_weight_used_at_two_depths(num_uses: int, residual: bool) -> None:
    b = Builder("r01")
    x, w, bias = (
        matrix(b, "batch", "x", 1, 2),
        matrix(b, "param", "w", 2, 2),
        matrix(b, "param", "bias", 1, 2),
    )
    scale = matrix(b, "param", "scale", 1, 2)
    (h,) = cut(b, 0, b(mul, x, scale))
    first = h
    for _ in range(num_uses):
        h = b(add, matmul(b, h, w), bias)
    if residual:
        h = b(add, h, first)
    (h,) = cut(b, 1, h)
    graph = differentiate(b, total(b, h), {"w": w, "bias": bias, "scale": scale})
    program = cut_and_check(graph, 3)
    assert edges(program, "gradient") == [(1, 0), (2, 1)]
    assert {p.name for p in program.task(1, "W").output_ports} == {"w", "bias"}
    assert ops(program, 1, "W").count("dot_general") == num_uses


def test_r01_the_numbers() -> None:
    b = Builder("r01")
    x, w, one = (
        matrix(b, "batch", "x", 1, 2),
        matrix(b, "param", "w", 2, 2),
        matrix(b, "param", "one", 1, 2),
    )
    (h,) = cut(b, 0, b(mul, x, one))
    (h,) = cut(b, 1, matmul(b, matmul(b, h, w), w))
    graph = differentiate(b, total(b, h), {"w": w, "one": one})
    program = verify_program(split_backward(partition_stages(verify(graph), 3)))
    inputs = {
        ("batch", "x"): np.array([[1.0, -1.0]]),
        ("param", "w"): np.array([[1.0, 2.0], [3.0, 4.0]]),
        ("param", "one"): np.ones((1, 2)),
        ("loss_grad", ""): np.array(1.0),
    }
    found = run_program(program, inputs, ("I", "W"))
    assert found["loss", ""] == -20
    np.testing.assert_array_equal(found["param_grad", "w"], [[1, 5], [-5, -9]])
    np.testing.assert_array_equal(found["param_grad", "one"], [[17, -37]])  # dX = [17, 37], times x


def test_r03_an_opaque_backward_with_both_gradients_runs_once_in_i() -> None:
    program = _with_extern(lower_stage=True)
    names = [e.op.name for e in program.task(1, "I").eqns]
    assert names.count("extern") == 1
    assert "extern" not in ops(program, 1, "W")
    assert [p.name for p in program.task(1, "I").output_ports if p.role == "param_grad"] == ["w1"]


def test_r03_also_where_no_gradient_leaves_the_stage() -> None:
    program = _with_extern(lower_stage=False)
    assert ops(program, 1, "I").count("extern") == 1
    assert "extern" not in ops(program, 1, "W")


def _with_extern(*, lower_stage: bool) -> Program:
    """Stage 1 is an opaque product, whose backward gives both gradients at once."""
    b = Builder("r03")
    x, w0, w1 = (
        matrix(b, r, n, 3, 3) for r, n in (("batch", "x"), ("param", "w0"), ("param", "w1"))
    )  # type: ignore[arg-type]
    (h,) = cut(b, 0, matmul(b, x, w0))
    (y,) = b.emit(extern, h, w1, target="torch:mine.product.default", results=(h.type,), spec="{}")
    b.output(total(b, y), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (3, 3))
    dh, dw = b.emit(
        extern,
        g,
        h,
        w1,
        target="torch:mine.product_backward.default",
        results=(h.type, w1.type),
        spec="{}",
    )
    if lower_stage:
        (dh,) = b.emit(boundary, dh, index=0, backward=True)
        b.output(_tn(b, x, dh), "param_grad", "w0")
    b.output(dw, "param_grad", "w1")
    return verify_program(split_backward(partition_stages(b.build(), 2)))


def test_the_scale_of_a_norm_holds_nothing_for_w() -> None:
    b = Builder("norm")
    x, w, scale = (
        matrix(b, "batch", "x", 8, 4),
        matrix(b, "param", "w", 4, 4),
        matrix(b, "param", "s", 4),
    )
    (h,) = cut(b, 0, matmul(b, x, w))
    normal = b(tanh, h)
    graph = differentiate(
        b,
        total(b, b(tanh, b(mul, normal, b.expand(scale, normal.type.shape)))),
        {"w": w, "s": scale},
    )
    program = cut_and_check(graph, 2)
    assert [p.name for p in program.task(1, "I").output_ports if p.role == "param_grad"] == ["s"]
    assert types(program, 1, "handover") == []
    assert program.task(1, "W").eqns == ()


def test_a_view_of_a_residual_is_made_again_rather_than_handed_over() -> None:
    b = Builder("view")
    x, w, scale = (
        matrix(b, "batch", "x", 8, 4),
        matrix(b, "param", "w", 4, 4),
        matrix(b, "param", "s", 4, 4),
    )
    (h,) = cut(b, 0, matmul(b, x, w))
    row = b(reduce_sum, h, dims=(0,))
    graph = differentiate(
        b, total(b, matmul(b, b(tanh, b.expand(row, (8, 4))), scale)), {"w": w, "s": scale}
    )
    program = cut_and_check(graph, 2)
    assert types(program, 1, "handover") == []
    assert [v.type.shape for v in program.task(1, "W").inputs] == [(), (8, 4)]


def _scan_joint(*, shared: bool, head: bool) -> Graph:
    """h -> tanh(h w) over four layers by scan, backward by another scan that makes dh and dw together."""
    forward = Builder("forward")
    weight, hidden = TensorType(f64, (3, 3)), TensorType(f64, (2, 3))
    kinds = (weight, hidden) if shared else (hidden, weight)  # consts come before the carry
    inputs = {kind: forward.input(kind) for kind in kinds}
    y = forward(tanh, matmul(forward, inputs[hidden], inputs[weight]))
    for value in (y, inputs[hidden], y):
        forward.output(value)

    backward = Builder("backward")
    w = backward.input(weight) if shared else None
    d = backward.input(hidden)
    summed = backward.input(weight) if shared else None
    c, y = backward.input(hidden), backward.input(hidden)
    w = w or backward.input(weight)
    slope = backward(sub, d, backward(mul, backward(mul, d, y), y))
    dw = _tn(backward, c, slope)
    backward.output(_nt(backward, slope, w))
    backward.output(backward(add, summed, dw) if summed else dw)

    b = Builder("scan")
    x, w0 = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w0", 3, 3)
    ws = matrix(b, "param", "ws", *((3, 3) if shared else (4, 3, 3)))
    h = matmul(b, x, w0)
    if head:
        (h,) = cut(b, 0, h)
    n = int(shared)
    operands = (ws, h) if shared else (h, ws)
    last, cs, ys = b.emit(
        scan, *operands, body=forward.build(), num_consts=n, num_carry=1, length=4, reverse=False
    )
    b.output(total(b, last), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 3))
    operands = (ws, g, b.full(ws.type, 0.0), cs, ys) if shared else (g, cs, ys, ws)
    dh, dws = b.emit(
        scan,
        *operands,
        body=backward.build(),
        num_consts=n,
        num_carry=1 + n,
        length=4,
        reverse=True,
    )
    if head:
        (dh,) = b.emit(boundary, dh, index=0, backward=True)
    b.output(dws, "param_grad", "ws")
    b.output(_tn(b, x, dh), "param_grad", "w0")
    return b.build()


@pytest.mark.parametrize("shared", [False, True], ids=["stacked", "shared"])
@pytest.mark.parametrize("head", [False, True], ids=["first_stage", "later_stage"])
def test_a_backward_scan_is_split_in_two(shared: bool, head: bool) -> None:
    program = cut_and_check(_scan_joint(shared=shared, head=head), 1 + head)
    stage = int(head)
    (first,) = [e for e in program.task(stage, "I").eqns if e.op is scan]
    (second,) = [e for e in program.task(stage, "W").eqns if e.op is scan]
    products = [
        [e.op for e in part.attrs["body"].eqns].count(dot_general) for part in (first, second)
    ]
    assert products == [1, 1]
    assert first.attrs["num_carry"] == 1
    assert second.attrs["num_carry"] == int(shared)
    assert (4, 2, 3) in types(program, stage, "handover")


def test_a_scan_without_costly_weight_gradients_stays_whole() -> None:
    body = Builder("body")
    d, s, y = (body.input(TensorType(f64, (3,))) for _ in range(3))
    body.output(body(mul, d, s))
    body.output(body(mul, d, y))
    b = Builder("cheap")
    ss, ys = matrix(b, "param", "s", 4, 3), matrix(b, "batch", "y", 4, 3)
    b.output(total(b, b(mul, ss, ys)), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (3,))
    _, ds = b.emit(
        scan, g, ss, ys, body=body.build(), num_consts=0, num_carry=1, length=4, reverse=True
    )
    b.output(ds, "param_grad", "s")
    program = cut_and_check(b.build(), 1)
    assert [ops(program, 0, kind).count("scan") for kind in ("I", "W")] == [0, 1]


def test_control_flow_that_cannot_be_split_is_noted() -> None:
    branch = Builder("branch")
    d, h, w = (branch.input(TensorType(f64, (3, 3))) for _ in range(3))
    branch.output(_nt(branch, d, w))
    branch.output(_tn(branch, h, d))
    body = branch.build()
    b = Builder("branches")
    x, w0, w1 = (
        matrix(b, r, n, 3, 3) for r, n in (("batch", "x"), ("param", "w0"), ("param", "w1"))
    )  # type: ignore[arg-type]
    (h,) = cut(b, 0, matmul(b, x, w0))
    b.output(total(b, matmul(b, h, w1)), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (3, 3))
    dh, dw = b.emit(cond, b.literal(0, i32), g, h, w1, branches=(body, body))
    (dh,) = b.emit(boundary, dh, index=0, backward=True)
    b.output(dw, "param_grad", "w1")
    b.output(_tn(b, x, dh), "param_grad", "w0")
    program = cut_and_check(b.build(), 2)
    assert "cond" in ops(program, 1, "I")
    assert program.notes[-1].startswith(
        "stage 1: cond (unknown source) makes input and weight gradients"
    )
