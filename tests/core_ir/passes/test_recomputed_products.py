"""Products computed again for a weight gradient alone: in I, which hands W their results."""

import pytest
from joint_programs import cut, matmul, matrix, total
from test_partition_stages import cut_and_check

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.control import barrier, boundary, scan
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.passes.recomputed_products import dependents, recomputed_products
from plait.core_ir.types import TensorType, f64


def _nt(b: Builder, x: Value, y: Value) -> Value:
    return b(dot_general, x, y, batch=((), ()), contract=((1,), (1,)))


def _tn(b: Builder, x: Value, y: Value) -> Value:
    return b(dot_general, x, y, batch=((), ()), contract=((0,), (0,)))


def layer_gradients(b: Builder, h: Value, v: Value, w: Value, g: Value) -> tuple[Value, ...]:
    """Gradients of h, v and w in (h v) w, whose inner product is computed again: that of w alone reads it."""
    again = matmul(b, b(barrier, h), b(barrier, v))
    inner = _nt(b, g, w)
    return _nt(b, inner, v), _tn(b, h, inner), _tn(b, again, g)


def straight() -> Graph:
    """Two stages, x u and then a layer."""
    b = Builder("straight")
    x = matrix(b, "batch", "x", 2, 3)
    u, v, w = (matrix(b, "param", name, 3, 3) for name in "uvw")
    (h,) = cut(b, 0, matmul(b, x, u))
    b.output(total(b, matmul(b, matmul(b, h, v), w)), "loss")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad"), (2, 3))
    dh, dv, dw = layer_gradients(b, h, v, w, g)
    (dh,) = b.emit(boundary, dh, index=0, backward=True)
    for name, grad in (("u", _tn(b, x, dh)), ("v", dv), ("w", dw)):
        b.output(grad, "param_grad", name)
    return b.build()


def looped() -> Graph:
    """Two stages, x u and then four layers by scan."""
    weight, hidden = TensorType(f64, (3, 3)), TensorType(f64, (2, 3))
    forward = Builder("forward")
    h, v, w = (forward.input(t) for t in (hidden, weight, weight))
    forward.output(matmul(forward, matmul(forward, h, v), w))
    forward.output(h)
    backward = Builder("backward")
    g, h, v, w = (backward.input(t) for t in (hidden, hidden, weight, weight))
    for grad in layer_gradients(backward, h, v, w, g):
        backward.output(grad)

    b = Builder("looped")
    x, u = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "u", 3, 3)
    v, w = (matrix(b, "param", name, 4, 3, 3) for name in "vw")
    (h,) = cut(b, 0, matmul(b, x, u))
    attrs = {"num_consts": 0, "num_carry": 1, "length": 4}
    last, hs = b.emit(scan, h, v, w, body=forward.build(), reverse=False, **attrs)
    b.output(total(b, last), "loss")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad"), (2, 3))
    dh, dv, dw = b.emit(scan, g, hs, v, w, body=backward.build(), reverse=True, **attrs)
    (dh,) = b.emit(boundary, dh, index=0, backward=True)
    for name, grad in (("u", _tn(b, x, dh)), ("v", dv), ("w", dw)):
        b.output(grad, "param_grad", name)
    return b.build()


def products(task: Graph) -> list[Eqn]:
    bodies = [eqn.attrs["body"] for eqn in task.eqns if eqn.op is scan]
    return [e for graph in (task, *bodies) for e in graph.eqns if e.op is dot_general]


@pytest.mark.parametrize("joint", [straight, looped])
def test_they_stand_in_the_input_part(joint) -> None:
    program = cut_and_check(joint(), 2)
    assert {kind: len(products(program.task(1, kind))) for kind in "FIW"} == {
        "F": 2,
        "I": 3,
        "W": 2,
    }
    assert not any(port.role == "param" for port in program.task(1, "W").input_ports)


def test_what_reads_a_gradient_is_not_computed_again() -> None:
    b = Builder("values")
    x, w = matrix(b, "residual", "0", 2, 3), matrix(b, "param", "w", 3, 3)
    g = matrix(b, "gradient", "0", 2, 3)
    again = matmul(b, x, w)
    mixed = _tn(b, again, g)
    graph = b.build()
    assert dependents(graph.eqns, [g]) == {g, mixed}
    assert recomputed_products(graph.eqns, {g, mixed}) == {graph.eqns[0]}
