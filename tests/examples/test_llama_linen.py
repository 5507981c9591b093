"""The linen Llama is the nnx Llama of the same weights, and its main trains."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import traverse_util

import plait.models.weights.flax as flax_weights
from plait.models.llama import config, flax

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama_linen.py"


@pytest.fixture(scope="module")
def linen() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE), run_name="llama_linen"))


def as_variables(weights: dict[str, Any]) -> dict[str, Any]:
    """nnx names as linen variables: `layers.0.attn` -> `layers_0`, `attn`."""
    flat = {name.replace("layers.", "layers_"): array for name, array in weights.items()}
    return {"params": traverse_util.unflatten_dict(flat, sep=".")}


@pytest.mark.parametrize("tied_head", [False, True])
def test_loss_and_gradients_are_those_of_nnx(linen: SimpleNamespace, tied_head: bool) -> None:
    sizes = replace(config.CONFIGS["tiny"], num_layers=2, tied_head=tied_head)
    model = flax.build(sizes)
    batch = next(config.batches(sizes, "train", 2, seed=0))

    expected_loss, nnx_grads = jax.value_and_grad(flax.loss_fn)(model, batch)
    expected = as_variables(flax_weights.read(nnx_grads))
    loss, grads = jax.value_and_grad(linen.loss_fn)(
        as_variables(flax_weights.read(model)), batch, config=sizes
    )

    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    floor = 1e-3 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    for grad, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.abs(grad - want).max() <= 1e-5 * max(np.abs(want).max(), floor)


def test_initial_variables_have_the_same_names_and_shapes(linen: SimpleNamespace) -> None:
    sizes = replace(config.CONFIGS["tiny"], num_layers=1)
    tokens = next(config.batches(sizes, "train", 1, seed=0))["tokens"]
    variables = jax.eval_shape(linen.Llama(sizes).init, jax.random.key(0), tokens)
    wanted = as_variables(flax_weights.read(flax.build(sizes)))
    assert jax.tree.map(np.shape, variables) == jax.tree.map(np.shape, wanted)


def test_main_lowers_the_loss(linen: SimpleNamespace) -> None:
    first, last = linen.main(num_steps=5)
    assert last < first - 0.5
