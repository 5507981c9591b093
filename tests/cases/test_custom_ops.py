"""R03: a stage whose matrix product is the user's own op."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from case_runs import SCHEDULES, Run, numpy_tree

import plait

CALLS = {"backward": 0}


class Product(torch.autograd.Function):
    """A custom function of traceable operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


@jax.custom_vjp
def jax_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _forward(x: jax.Array, w: jax.Array) -> Any:
    return x @ w, (x, w)


def _backward(saved: Any, grad: jax.Array) -> Any:
    x, w = saved
    return grad @ w.T, x.T @ grad


jax_product.defvjp(_forward, _backward)


@torch.library.custom_op("plait_cases::product", mutates_args=())
def opaque_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@opaque_product.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


@torch.library.custom_op("plait_cases::product_backward", mutates_args=())
def opaque_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS["backward"] += 1
    return grad @ w.T, x.T @ grad


@opaque_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _opaque_vjp(ctx: Any, grad: torch.Tensor) -> Any:
    return opaque_backward(grad, *ctx.saved_tensors)


opaque_product.register_autograd(_opaque_vjp, setup_context=_save)


def three_stages(product: Any) -> Any:
    def loss_fn(p: Any, batch: Any) -> Any:
        h = plait.stage_boundary(batch["x"] @ p["w0"])
        h = plait.stage_boundary(product(h, p["w1"]))
        return ((h @ p["w2"]) ** 2).sum()

    return loss_fn


RNG = np.random.default_rng(0)
PARAMS = {f"w{s}": RNG.normal(size=(3, 3)).astype(np.float32) for s in range(3)}
X = RNG.normal(size=(4, 3)).astype(np.float32)


def reference() -> dict[str, np.ndarray[Any, Any]]:
    p = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in PARAMS.items()}
    (three_stages(torch.matmul)(p, {"x": torch.tensor(X, dtype=torch.float64)}) / 2).backward()
    return {n: t.grad.numpy() for n, t in p.items()}  # type: ignore[union-attr]


def check(run: Run, product: Any) -> plait.Pipeline:
    batch = {"x": run.array(X)}
    model = run.model(PARAMS)
    pipeline = run.compile(three_stages(product), model, batch, num_microbatches=2)
    _, grads = numpy_tree(pipeline.loss_and_grads(batch))
    for name, wanted in reference().items():
        np.testing.assert_allclose(grads[name], wanted, rtol=1e-5, atol=1e-4)
    return pipeline


def num_products(pipeline: plait.Pipeline, task: Any) -> int:
    return sum(e.op.name == "dot_general" for e in pipeline.program.task(1, task).eqns)


@pytest.mark.parametrize("engine", ["local", "mpmd"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r03_a_traceable_function_splits_like_other_code(engine: str, schedule: str) -> None:
    for source, product in (("torch", Product.apply), ("jax", jax_product)):
        pipeline = check(Run(source, engine, schedule), product)
        assert (num_products(pipeline, "I"), num_products(pipeline, "W")) == (1, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r03_an_opaque_op_is_one_unit_that_runs_once_in_i(schedule: str) -> None:
    run = Run("torch", "local", schedule)
    CALLS["backward"] = 0
    pipeline = check(run, opaque_product)
    assert CALLS["backward"] == 2
    assert [e.op.name for e in pipeline.program.task(1, "I").eqns if e.op.name == "extern"] == [
        "extern"
    ]
    assert all(e.op.name != "extern" for e in pipeline.program.task(1, "W").eqns)


def test_an_opaque_op_on_the_other_backend_is_refused_with_op_and_line() -> None:
    run = Run("torch", "mpmd", "1f1b")
    batch = {"x": run.array(X)}
    with pytest.raises(
        plait.PlaitError, match=r"test_custom_ops\.py:\d+:.*plait_cases[.:]+product"
    ):
        run.compile(three_stages(opaque_product), run.model(PARAMS), batch, num_microbatches=2)
