"""Gradients of both JAX engines go into optax as a whole tree, jitted or not, as those of jax.grad do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import plait


def loss_fn(p: Any, batch: Any) -> Any:
    h = plait.stage_boundary(jnp.tanh(batch["x"] @ p["w"]["first"]))
    return jnp.mean((h @ p["w"]["second"]) ** 2)


def params() -> Any:
    rng = np.random.default_rng(0)
    return {
        "w": {n: jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for n in ("first", "second")}
    }


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_a_training_loop_with_optax(engine: str) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    batch = {"x": jnp.asarray(np.random.default_rng(1).normal(size=(8, 3)), jnp.float32)}

    @jax.jit
    def update(grads: Any, state: Any, p: Any) -> Any:
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    pipeline = plait.compile(loss_fn, params(), batch, num_microbatches=4, engine=engine)
    p, plain = params(), params()
    state, plain_state = optimizer.init(p), optimizer.init(plain)
    for _ in range(5):
        loss, grads = pipeline.loss_and_grads(batch, p)
        plain_loss, plain_grads = jax.value_and_grad(loss_fn)(plain, batch)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
        p, state = update(grads, state, p)
        plain, plain_state = update(plain_grads, plain_state, plain)
    for got, wanted in zip(jax.tree.leaves(p), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_gradients_of_a_torch_model_lie_on_one_device(engine: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    batch = {"x": torch.ones(4, 3)}
    pipeline = plait.compile(
        lambda m, b: m(b["x"]).mean(),
        model,
        batch,
        split=["1"],
        num_microbatches=2,
        backend="jax",
        engine=engine,
    )
    _, grads = pipeline.loss_and_grads(batch)
    assert len({next(iter(g.devices())) for g in grads.values()}) == 1
    assert float(optax.tree.norm(grads)) > 0
