"""Llama in Flax linen, of the shapes of `plait.models.llama`: python examples/llama_linen.py

Trains a few steps on real text. A linen model is cut by module path, `split=["layers_2"]`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from plait.models.llama.config import CONFIGS, Config, batches
from plait.models.llama.flax import INIT_STD, cross_entropy, rotary_tables, rotate

Variables = Mapping[str, Any]


def linear(num_out: int, name: str) -> nn.Dense:
    init = nn.initializers.normal(INIT_STD)
    return nn.Dense(num_out, use_bias=False, kernel_init=init, name=name)


class RMSNorm(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.ones, (self.config.dim,))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.config.norm_eps)
        return y.astype(x.dtype) * weight


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        c = self.config
        q = linear(c.dim, "wq")(x).reshape(*x.shape[:-1], c.num_heads, c.head_dim)
        k = linear(c.num_kv_heads * c.head_dim, "wk")(x)
        v = linear(c.num_kv_heads * c.head_dim, "wv")(x)
        k, v = (y.reshape(*x.shape[:-1], c.num_kv_heads, c.head_dim) for y in (k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return linear(c.dim, "wo")(out.reshape(x.shape))


class MLP(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gate = jax.nn.silu(linear(self.config.hidden_dim, "w1")(x))
        return linear(self.config.dim, "w2")(gate * linear(self.config.hidden_dim, "w3")(x))


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        c = self.config
        x = x + Attention(c, name="attn")(RMSNorm(c, name="attn_norm")(x), cos, sin)
        return x + MLP(c, name="mlp")(RMSNorm(c, name="mlp_norm")(x))


class Llama(nn.Module):
    """i32[B, T] -> logits [B, T, V]."""

    config: Config

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        c = self.config
        init = nn.initializers.normal(INIT_STD)
        embed = nn.Embed(c.vocab_size, c.dim, embedding_init=init, name="tok_embed")
        x = embed(tokens)
        cos, sin = rotary_tables(c, tokens.shape[1], x)
        for index in range(c.num_layers):
            x = Layer(c, name=f"layers_{index}")(x, cos, sin)
        x = RMSNorm(c, name="norm")(x)
        return embed.attend(x) if c.tied_head else linear(c.vocab_size, "head")(x)


def loss_fn(variables: Variables, batch: Mapping[str, Array], *, config: Config) -> Array:
    """Mean cross entropy of the next token; {"tokens": i32[B, T], "targets": i32[B, T]}."""
    logits = Llama(config).apply(variables, batch["tokens"])
    return cross_entropy(logits.astype(jnp.float32), batch["targets"])


def main(num_steps: int = 20, learning_rate: float = 0.1) -> tuple[float, float]:
    """Trains by gradient descent; prints and returns the first and the last loss."""
    config = CONFIGS["tiny"]
    stream = batches(config, "train", batch_size=16, seed=0)
    variables = Llama(config).init(jax.random.key(0), next(stream)["tokens"])
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda variables, batch: loss_fn(variables, batch, config=config))
    )
    losses = []
    for _ in range(num_steps):
        loss, grads = value_and_grad(variables, next(stream))
        variables = jax.tree.map(lambda p, g: p - learning_rate * g, variables, grads)
        losses.append(float(loss))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {num_steps} steps")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
