"""The unpipelined JAX step against gradients worked out by hand, and against one call over the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from plait.core_ir.numerics import gradient_error, relative_error
from plait.frontends.jax.reference import named_gradients, reference
from plait.pipeline import step_keys

BATCH = np.array([[1.0], [2.0], [3.0], [6.0]], np.float32)
PARAMS = {"weight": jnp.array([2.0]), "unused": jnp.ones(3), "steps": jnp.array([1])}


def total(params: dict[str, Array], batch: Array) -> Array:
    return (batch * params["weight"]).sum()


@pytest.mark.parametrize(("reduction", "loss", "grad"), [("mean", 12.0, 6.0), ("sum", 24.0, 12.0)])
def test_sum_and_mean_over_microbatches(reduction: Any, loss: float, grad: float) -> None:
    # Two microbatches of x = 1 + 2 and 3 + 6; the loss is 2 x, the gradient x.
    found = reference(total, PARAMS, BATCH, num_microbatches=2, reduction=reduction)
    assert found.loss == loss
    assert found.grads["weight"] == grad
    assert np.array_equal(found.grads["unused"], np.zeros(3))
    assert set(found.grads) == {"weight", "unused"}


def test_state_is_chained() -> None:
    def loss_fn(params: Any, batch: Array, state: Any) -> tuple[Array, Any]:
        return (batch * params).sum() * state["n"], {"n": state["n"] + 1}

    found = reference(
        loss_fn, jnp.array([2.0]), BATCH, num_microbatches=4, state={"n": jnp.array(0.0)}
    )
    # 2 (0 * 1 + 1 * 2 + 2 * 3 + 3 * 6) / 4
    assert found.loss == 13.0
    assert found.buffers == {"n": 4.0}


def test_each_microbatch_has_its_key() -> None:
    def loss_fn(params: Array, batch: Array, *, rng: Array) -> Array:
        return (params * jax.random.normal(rng)).sum()

    keys = step_keys(0, 0, 2)
    found = reference(loss_fn, jnp.array([1.0]), BATCH, num_microbatches=2, keys=keys)
    draws = [
        jax.random.normal(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"))
        for key in keys
    ]
    assert relative_error(found.grads["model"], np.array([sum(map(float, draws)) / 2])) < 1e-6
    assert draws[0] != draws[1]


def test_microbatches_of_equal_size_give_what_the_whole_batch_gives_for_an_nnx_module() -> None:
    model = nnx.Linear(1, 3, rngs=nnx.Rngs(0))

    def loss_fn(model: nnx.Linear, batch: Array) -> Array:
        return jnp.square(model(batch)).mean()

    found = reference(loss_fn, model, BATCH, num_microbatches=2)
    loss, grads = nnx.value_and_grad(loss_fn)(model, jnp.asarray(BATCH))
    assert relative_error(found.loss, np.asarray(loss)) < 1e-6
    assert gradient_error(found.grads, named_gradients(grads)) < 1e-6
    assert set(found.grads) == {"kernel", "bias"}


def test_named_gradients_leave_out_integers_and_none() -> None:
    zeros = np.zeros(2, jax.dtypes.float0)
    grads = {"a": jnp.ones(1), "b": None, "c": zeros, "d": [jnp.ones(2)]}
    assert list(named_gradients(grads)) == ["a", "d.0"]
