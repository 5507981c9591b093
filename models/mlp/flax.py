"""The gated MLP in Flax nnx.

Weights are [in, out] and products are `x @ w`, as in PyTorch: both capture to the same graph.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from plait.models.mlp.config import Config

Boundary = Callable[[Array], Array]


def no_boundary(x: Array) -> Array:
    """The identity, the default for `boundary`."""
    return x


class GatedMLP(nnx.Module):
    """f32[B, D] -> f32[B, D]: (silu(x w1) * (x w3)) w2."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.w1 = _weight(config.dim, config.hidden_dim, rngs)
        self.w2 = _weight(config.hidden_dim, config.dim, rngs)
        self.w3 = _weight(config.dim, config.hidden_dim, rngs)

    def __call__(self, x: Array) -> Array:
        return (jax.nn.silu(x @ self.w1[...]) * (x @ self.w3[...])) @ self.w2[...]


class MLP(nnx.Module):
    """`num_layers` gated MLPs in a row; `boundary` is called before each layer in `cuts`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([GatedMLP(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(
        self, x: Array, *, cuts: Sequence[int] = (), boundary: Boundary = no_boundary
    ) -> Array:
        for index, layer in enumerate(self.layers):
            x = layer(boundary(x) if index in cuts else x)
        return x


def build(config: Config, seed: int = 0) -> MLP:
    """A model with weights drawn from `seed`."""
    return MLP(config, rngs=nnx.Rngs(seed))


def loss_fn(
    model: MLP,
    batch: Mapping[str, Array],
    *,
    cuts: Sequence[int] = (),
    boundary: Boundary = no_boundary,
) -> Array:
    """Mean squared error of {"x": f32[B, D], "y": f32[B, D]}, a scalar."""
    return jnp.mean(jnp.square(model(batch["x"], cuts=cuts, boundary=boundary) - batch["y"]))


def _weight(num_in: int, num_out: int, rngs: nnx.Rngs) -> nnx.Param[Array]:
    return nnx.Param(rngs.params.normal((num_in, num_out)) / num_in**0.5)
