"""A model of `plait.models` in Flax nnx."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from plait.api import stage_boundary
from plait.core_ir.op import Array
from plait.extras import load
from plait.models.weights import flax as weights_of
from plait.workloads.family import parallel_form


def build(
    name: str,
    config: Any,
    mesh: Mapping[str, int],
    cuts: Sequence[int],
    *,
    weights: Mapping[str, Array] | None,
    dtype: str,
    abstract: bool,
) -> tuple[Callable[..., Any], Callable[..., Any], nnx.Module]:
    """The loss on one device, that over the axes of the model that a mesh has, with a boundary before each layer of
    `cuts`, and model.

    weights: by Flax's names, instead of those that the model draws itself. An abstract model has types only.
    """
    module = load("jax", f"models.{name}.flax")
    make = partial(_make, module.build, config, weights, dtype)
    model = nnx.eval_shape(make) if abstract else make()
    parallel, axes = parallel_form(name, "jax", "flax", mesh)
    loss_fn = module.loss_fn
    if parallel is not None:
        loss_fn = parallel.loss_fn_over(AbstractMesh(tuple(axes.values()), tuple(axes)))
    return module.loss_fn, partial(loss_fn, cuts=tuple(cuts), boundary=stage_boundary), model


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
