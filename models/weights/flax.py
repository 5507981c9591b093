"""Weights of a Flax nnx model as NumPy arrays, by dotted paths: `layers.0.attn.wq.kernel`."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx


def read(model: nnx.Module) -> dict[str, npt.NDArray[np.generic]]:
    """Copies of all parameters."""
    return {name: np.array(param[...]) for name, param in _params(model).items()}


def write(model: nnx.Module, weights: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Sets every parameter of `model` in place.

    Raises:
        ValueError: the names of `weights` are not exactly those of the model.
    """
    params = _params(model)
    if params.keys() != weights.keys():
        raise ValueError(f"names differ: {sorted(params.keys() ^ weights.keys())}")
    for name, param in params.items():
        param[...] = jnp.array(weights[name])


def _params(model: nnx.Module) -> dict[str, nnx.Param[jnp.ndarray]]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    names = [".".join(map(str, path)) for path, _ in flat]
    return dict(zip(names, (param for _, param in flat), strict=True))
