"""A model of `plait.models` in Flax nnx."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh

from plait.api import stage_boundary
from plait.core_ir.op import Array
from plait.extras import load
from plait.models.weights import flax as weights_of


def build(
    name: str,
    config: Any,
    axes: Mapping[str, int],
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
    if axes:  # state that every replica would change on its own
        model.set_attributes(training=False, raise_if_not_found=False)
    own = _own_axes(name, axes)
    loss_fn = module.loss_fn
    if own:
        mesh = AbstractMesh(tuple(own.values()), tuple(own))
        loss_fn = load("jax", f"models.{name}.parallel_flax").loss_fn_over(mesh)
    return module.loss_fn, partial(loss_fn, cuts=tuple(cuts), boundary=stage_boundary), model


def _own_axes(name: str, axes: Mapping[str, int]) -> dict[str, int]:
    """The axes over which the model is cut; what others do, the compiler knows."""
    if find_spec(f"plait.models.{name}.parallel_flax") is None:
        return {}
    known = load("jax", f"models.{name}.parallel_flax").AXES
    return {axis: size for axis, size in axes.items() if axis in known}


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
