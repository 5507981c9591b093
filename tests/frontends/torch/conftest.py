"""Running a torch function through the rules and the NumPy interpreter, beside torch itself."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from plait.core_ir.arrays import to_numpy
from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.interpret import interpret
from plait.core_ir.mesh import Mesh
from plait.core_ir.types import KEY
from plait.core_ir.verify import verify
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture
from plait.frontends.torch.dtypes import type_of
from plait.frontends.torch.lower import lower_nodes

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""By dtype of a result, relative to its largest entry, at least 1."""


def lowered(function: Callable[..., Any], args: Sequence[Any], mesh: Mesh | None = None) -> Graph:
    """The aten ops of a function of tensors as a Graph: inputs are the tensors and a key."""
    traced = make_fx(functionalize(function), tracing_mode="fake")(*args)
    b = Builder("rule")
    nodes = list(traced.graph.nodes)
    env = {
        node: b.input(type_of(node.meta["val"]))
        for node in nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
    }
    key = b.input(KEY)
    body = [n for n in nodes if n.op not in ("placeholder", "output")]
    lower_nodes(b, body, env, key, mesh)
    (output,) = (n for n in nodes if n.op == "output")
    for node in pytree.tree_leaves(output.args[0]):
        b.output(env[node])
    graph = b.build()
    verify(graph)
    return graph


def compare(function: Callable[..., Any], *args: Any) -> Graph:
    """Assert that the interpreted Graph gives what torch gives; the Graph."""
    graph = lowered(function, args)
    key = np.array([0, 1], np.uint32)
    found = interpret(graph, [*(to_numpy(x) for x in args), key])
    expected = pytree.tree_leaves(function(*args))
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        check(got, want)
    return graph


def check(got: Any, want: Tensor) -> None:
    """Equal for integers; within the dtype's tolerance for floats, NaN at the same places."""
    reference = to_numpy(want)
    assert got.dtype == reference.dtype
    assert got.shape == reference.shape
    tolerance = TOLERANCE.get(torch.float32 if want.is_complex() else want.dtype)
    if tolerance is None:
        np.testing.assert_array_equal(got, reference)
        return
    wide = np.complex128 if want.is_complex() else np.float64
    a, b = got.astype(wide), reference.astype(wide)
    finite = np.abs(b[np.isfinite(b)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@pytest.fixture(name="compare")
def _compare() -> Callable[..., Graph]:
    return compare


@pytest.fixture(name="lowered")
def _lowered() -> Callable[..., Graph]:
    return lowered


def call(target: Any, args: Sequence[Any], expected: Sequence[Tensor]) -> None:
    """Assert that the rule of one aten op, called by hand, gives these results."""
    graph = fx.Graph()
    b = Builder("call")
    env: dict[fx.Node, Any] = {}
    given = []

    def placeholder(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = x
        env[node] = b.input(type_of(x))
        given.append(to_numpy(x))
        return node

    node = graph.call_function(target, tuple(map(placeholder, args)))
    node.meta["val"] = tuple(expected)
    items = [graph.call_function(operator.getitem, (node, i)) for i in range(len(expected))]
    lower_nodes(b, [node, *items], env, None)
    for item in items:
        b.output(env[item])
    for got, want in zip(interpret(verify(b.build()), given), expected, strict=True):
        check(got, want)


class Holder(nn.Module):
    """A module with parameters 0, 1, ..."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(t.clone()) for t in tensors)


def compare_gradients(function: Callable[..., Tensor], *tensors: Tensor, **kwargs: Any) -> Captured:
    """Assert that a function of parameters, captured, gives the values and the gradients that autograd gives."""
    torch.manual_seed(1)
    model = Holder(tensors)
    cotangent = torch.randn(function(*tensors).shape).to(tensors[0].dtype)

    wide = (
        torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    )

    def loss_fn(model: Holder, batch: None) -> tuple[Tensor, Tensor]:
        out = function(*model.params)
        return (out.to(wide) * cotangent.to(wide)).sum(), out

    captured = capture(loss_fn, model, None, num_microbatches=1, split=None, has_aux=True)
    results = run(captured, None)
    loss, out = loss_fn(model, None)
    loss.backward()
    assert results.pop(("loss", "")).shape == ()
    check(results.pop(("aux", "")), out.detach())
    for name, param in model.named_parameters():
        if param.grad is not None:
            check(results.pop(("param_grad", name)), param.grad)
    assert not results
    return captured


def run(captured: Captured, batch: Any, key: Sequence[int] = (0, 1)) -> dict[tuple[str, str], Any]:
    """Interpret a captured program on the model's own arrays: results by role and name."""
    graph = verify(captured.graph)
    held, leaves = captured.read_leaves(), dict(captured.flatten_batch(batch))
    operands = []
    for port, value in zip(graph.input_ports, graph.inputs, strict=True):
        if port.role == "rng_key":
            operands.append(np.array(key, np.uint32))
        elif port.role == "loss_grad":
            operands.append(np.ones((), value.type.dtype.numpy))
        else:
            array = (leaves if port.role == "batch" else held)[port.name]
            operands.append(to_numpy(array).astype(value.type.dtype.numpy))
    results = interpret(graph, operands)
    return {(p.role, p.name): r for p, r in zip(graph.output_ports, results, strict=True)}


@pytest.fixture(name="compare_gradients")
def _compare_gradients() -> Callable[..., Captured]:
    return compare_gradients


@pytest.fixture(name="run")
def _run() -> Callable[..., dict[tuple[str, str], Any]]:
    return run


@pytest.fixture(name="call")
def _call() -> Callable[..., None]:
    return call
