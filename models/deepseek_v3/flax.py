"""DeepSeek-V3 in Flax nnx.

Shapes: B batch, T time, D model dim, N heads, L latent dim, Q head dim of queries and keys, P its rotary part, V head
dim of values.

Rotary positions turn the two halves of a head's rotary part, not its even and odd entries as published checkpoints do:
to load one, bring the rotary outputs of `wq`, `wq_b` and `wkv_a` into that order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from plait.models.deepseek_v3.config import Config
from plait.models.deepseek_v3.moe.flax import LOCAL, Exchange, MoE

Boundary = Callable[[Array], Array]
Args = TypeVar("Args", bound=tuple[Any, ...])

INIT_STD = 0.02


def no_boundary(x: Array) -> Array:
    """The identity, the default for `boundary`."""
    return x


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last dim, computed in f32."""

    def __init__(self, dim: int, eps: float) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(dim))

    def __call__(self, x: Array) -> Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.weight[...]


class Attention(nnx.Module):
    """Causal multi-head latent attention, [B, T, D] -> [B, T, D] (arXiv 2412.19437, section 2.1.1).

    Keys and values of all heads come from one latent of L dims, queries from another; beside it, a key head has a
    rotary part, which all heads share.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        q_dim = config.num_heads * config.qk_head_dim
        kv_dim = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        latent_dim = config.kv_lora_rank
        if config.q_lora_rank is None:
            self.wq = _linear(config.dim, q_dim, rngs)
        else:
            self.wq_a = _linear(config.dim, config.q_lora_rank, rngs)
            self.q_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.wq_b = _linear(config.q_lora_rank, q_dim, rngs)
        self.wkv_a = _linear(config.dim, latent_dim + config.qk_rope_head_dim, rngs)
        self.kv_norm = RMSNorm(latent_dim, config.norm_eps)
        self.wkv_b = _linear(latent_dim, kv_dim, rngs)
        self.wo = _linear(config.num_heads * config.v_head_dim, config.dim, rngs)

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        c = self.config
        q = self.wq(x) if c.q_lora_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_rope = jnp.split(_heads(q, c.num_heads), [c.qk_nope_head_dim], -1)
        latent, k_rope = jnp.split(self.wkv_a(x), [c.kv_lora_rank], -1)
        kv = _heads(self.wkv_b(self.kv_norm(latent)), c.num_heads)
        k_nope, v = jnp.split(kv, [c.qk_nope_head_dim], -1)
        k_rope = rotate(_heads(k_rope, 1), cos, sin)
        k_rope = jnp.broadcast_to(k_rope, (*k_nope.shape[:-1], c.qk_rope_head_dim))
        q = jnp.concatenate([q_nope, rotate(q_rope, cos, sin)], -1)
        k = jnp.concatenate([k_nope, k_rope], -1)
        return self.wo(attend(q, k, v).reshape(*x.shape[:-1], -1))


class MLP(nnx.Module):
    """Gated MLP, [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, hidden_dim: int, *, rngs: nnx.Rngs) -> None:
        self.w1 = _linear(dim, hidden_dim, rngs)
        self.w2 = _linear(hidden_dim, dim, rngs)
        self.w3 = _linear(dim, hidden_dim, rngs)

    def __call__(self, x: Array) -> Array:
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class Layer(nnx.Module):
    """Attention and what follows it, each normalised before and added to the residual stream.

    What follows is `mlp`, in a dense layer; else `shared`, the experts of every token as one MLP, and `moe`.
    """

    def __init__(self, config: Config, index: int, exchange: Exchange, *, rngs: nnx.Rngs) -> None:
        self.is_dense = index < config.num_dense_layers
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        if self.is_dense:
            self.mlp = MLP(config.dim, config.hidden_dim, rngs=rngs)
        else:
            shared_dim = config.num_shared_experts * config.moe_hidden_dim
            self.shared = MLP(config.dim, shared_dim, rngs=rngs)
            self.moe = MoE(config, exchange, rngs=rngs)

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + (self.mlp(y) if self.is_dense else self.shared(y) + self.moe(y))


class DeepSeekV3(nnx.Module):
    """i32[B, T] -> logits [B, T, vocabulary]; `boundary` is called before each layer in `cuts`.

    A forward changes the `counts` of the routers, unless `set_attributes(training=False)` was called.
    """

    def __init__(self, config: Config, exchange: Exchange = LOCAL, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.tok_embed = nnx.Embed(
            config.vocab_size,
            config.dim,
            embedding_init=nnx.initializers.normal(INIT_STD),
            promote_dtype=_own_dtype,
            rngs=rngs,
        )
        self.layers = nnx.List(
            [Layer(config, i, exchange, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = _linear(config.dim, config.vocab_size, rngs)

    def __call__(
        self, tokens: Array, *, cuts: Sequence[int] = (), boundary: Boundary = no_boundary
    ) -> Array:
        x = self.tok_embed(tokens)
        cos, sin = rotary_tables(self.config, tokens.shape[1], x)
        for index, layer in enumerate(self.layers):
            x = layer(boundary(x) if index in cuts else x, cos, sin)
        return self.head(self.norm(x))


def build(config: Config, seed: int = 0, *, exchange: Exchange = LOCAL) -> DeepSeekV3:
    """A model with weights drawn from `seed`."""
    return DeepSeekV3(config, exchange, rngs=nnx.Rngs(seed))


def loss_fn(
    model: DeepSeekV3,
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


def attend(q: Array, k: Array, v: Array) -> Array:
    """Causal attention, softmax in f32; [B, T, N, Q] twice, [B, T, N, V] -> [B, T, N, V].

    `jax.nn.dot_product_attention` wants values of the size of the keys.
    """
    scores = jnp.einsum("btnq,bsnq->bnts", q, k, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores).astype(v.dtype), v)


def rotary_tables(config: Config, num_positions: int, like: Array) -> tuple[Array, Array]:
    """Cosines and sines [T, P/2] of the rotary angles, computed in f32, as `like`'s dtype."""
    exponents = jnp.arange(0, config.qk_rope_head_dim, 2) / config.qk_rope_head_dim
    positions = jnp.arange(num_positions, dtype=jnp.float32)
    angles = positions[:, None] * jnp.power(config.rope_base, -exponents)
    return jnp.cos(angles).astype(like.dtype), jnp.sin(angles).astype(like.dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the two halves of each head of [B, T, N, P] by tables [T, P/2]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _linear(num_in: int, num_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(INIT_STD)
    return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=init, rngs=rngs)


def _own_dtype(args: Args, /, *, dtype: object = None, inexact: bool = True) -> Args:
    """No promotion: an nnx.Embed fixes its dtype when built and would undo a later cast."""
    return args


def _heads(x: Array, num_heads: int) -> Array:
    """[B, T, N * H] -> [B, T, N, H]."""
    return x.reshape(*x.shape[:-1], num_heads, -1)
