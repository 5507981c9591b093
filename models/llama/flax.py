"""Llama in Flax nnx.

Shapes: B batch, T time, D model dim, N heads, K key-value heads, H head dim, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from plait.models.llama.config import Config

Boundary = Callable[[Array], Array]
Attend = Callable[[Array, Array, Array], Array]
Args = TypeVar("Args", bound=tuple[Any, ...])

INIT_STD = 0.02


def no_boundary(x: Array) -> Array:
    """The identity, the default for `boundary`."""
    return x


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last dim, computed in f32."""

    def __init__(self, config: Config) -> None:
        self.eps = config.norm_eps
        self.weight = nnx.Param(jnp.ones(config.dim))

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.weight[...]


def attend_causally(q: Array, k: Array, v: Array) -> Array:
    """Causal grouped-query attention; [B, T, N, H], [B, T, K, H] twice -> [B, T, N, H]."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Attention(nnx.Module):
    """Causal grouped-query attention with its projections, [B, T, D] -> [B, T, D]; of all heads, or of some."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        kv_dim = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.wq = _linear(config.dim, config.dim, rngs)
        self.wk = _linear(config.dim, kv_dim, rngs)
        self.wv = _linear(config.dim, kv_dim, rngs)
        self.wo = _linear(config.dim, config.dim, rngs)

    def __call__(self, x: Array, cos: Array, sin: Array, attend: Attend = attend_causally) -> Array:
        q, k, v = (_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.wo(out.reshape(*x.shape[:-1], -1))


class MLP(nnx.Module):
    """Gated MLP, [B, T, D] -> [B, T, D]."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.w1 = _linear(config.dim, config.hidden_dim, rngs)
        self.w2 = _linear(config.hidden_dim, config.dim, rngs)
        self.w3 = _linear(config.dim, config.hidden_dim, rngs)

    def __call__(self, x: Array) -> Array:
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class Layer(nnx.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """i32[B, T] -> logits [B, T, V]; `boundary` is called before each layer in `cuts`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tok_embed = nnx.Embed(
            config.vocab_size,
            config.dim,
            embedding_init=nnx.initializers.normal(INIT_STD),
            promote_dtype=_own_dtype,
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config)
        if not config.tied_head:
            self.head = _linear(config.dim, config.vocab_size, rngs)

    def __call__(
        self, tokens: Array, *, cuts: Sequence[int] = (), boundary: Boundary = no_boundary
    ) -> Array:
        x = self.tok_embed(tokens)
        cos, sin = rotary_tables(self.config, tokens.shape[1], x)
        for index, layer in enumerate(self.layers):
            x = layer(boundary(x) if index in cuts else x, cos, sin)
        x = self.norm(x)
        return self.tok_embed.attend(x) if self.config.tied_head else self.head(x)


def build(config: Config, seed: int = 0) -> Llama:
    """A model with weights drawn from `seed`."""
    return Llama(config, rngs=nnx.Rngs(seed))


def loss_fn(
    model: Llama,
    batch: Mapping[str, Array],
    *,
    cuts: Sequence[int] = (),
    boundary: Boundary = no_boundary,
) -> Array:
    """Mean cross entropy of the next token, in f32; {"tokens": i32[B, T], "targets": i32[B, T]}."""
    logits = model(batch["tokens"], cuts=cuts, boundary=boundary).astype(jnp.float32)
    return cross_entropy(logits, batch["targets"])


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Mean of -log softmax(logits)[target] over all positions; [B, T, V], i32[B, T] -> scalar."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1).mean()


def rotary_tables(config: Config, num_positions: int, like: Array) -> tuple[Array, Array]:
    """Cosines and sines [T, H/2] of the rotary angles, computed in f32, as `like`'s dtype."""
    exponents = jnp.arange(0, config.head_dim, 2) / config.head_dim
    positions = jnp.arange(num_positions, dtype=jnp.float32)
    angles = positions[:, None] * jnp.power(config.rope_base, -exponents)
    return jnp.cos(angles).astype(like.dtype), jnp.sin(angles).astype(like.dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the two halves of each head of [B, T, N, H] by tables [T, H/2]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _linear(num_in: int, num_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=init, rngs=rngs)


def _own_dtype(args: Args, /, *, dtype: object = None, inexact: bool = True) -> Args:
    """No promotion: an nnx.Embed fixes its dtype when built and would undo a later cast."""
    return args


def _heads(x: Array, head_dim: int) -> Array:
    """[B, T, N * H] -> [B, T, N, H]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)
