"""A model of `plait.models` in Flax nnx."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from plait.api import stage_boundary
from plait.core_ir.op import Array
from plait.extras import load
from plait.models.weights import flax as weights_of


def build(
    name: str,
    config: Any,
    cuts: Sequence[int],
    *,
    weights: Mapping[str, Array] | None,
    dtype: str,
    abstract: bool,
) -> tuple[Callable[..., Any], nnx.Module]:
    """Loss function, with a boundary before each layer of `cuts`, and model.

    weights: by Flax's names, instead of those that the model draws itself. An abstract model has types only.
    """
    module = load("jax", f"models.{name}.flax")
    make = partial(_make, module.build, config, weights, dtype)
    model = nnx.eval_shape(make) if abstract else make()
    return partial(module.loss_fn, cuts=tuple(cuts), boundary=stage_boundary), model


def _make(
    build: Callable[[Any], Any], config: Any, weights: Mapping[str, Array] | None, dtype: str
) -> Any:
    model = build(config)
    if weights is not None:
        weights_of.write(model, weights)
    if dtype != "bf16":
        return model
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, model
    )
