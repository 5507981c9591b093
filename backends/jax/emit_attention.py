"""Emitters of attention and its backward, composed of lax operations: scores and softmax in f32 (f64 for f64).

Shapes: B batch, H query heads, K key and value heads, G = H / K, T queries, S keys.
"""

import jax
import numpy as np
from jax import lax

from plait.backends.jax.emit_linalg import FULL
from plait.backends.jax.rule import Table, cast, many, widen
from plait.core_ir.ops import attention as ops

_BATCH = (0, 1)


def _product(a: jax.Array, b: jax.Array, over_a: int, over_b: int) -> jax.Array:
    """Of matrices batched over (B, K), summed over one dimension of each."""
    numbers = (((over_a,), (over_b,)), (_BATCH, _BATCH))
    out = widen(a).dtype
    return lax.dot_general(a, b, numbers, precision=FULL, preferred_element_type=out)


def _by_kv_head(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """`[B, H, T, ...]` as `[B, K, G * T, ...]`: the queries of one key head side by side."""
    batch, heads, *rest = x.shape
    group = heads // num_kv_heads
    return lax.reshape(x, (batch, num_kv_heads, group * rest[0], *rest[1:]))


def _over(x: jax.Array, like: jax.Array) -> jax.Array:
    """A number for each row of `like`, at each element of the row."""
    return lax.broadcast_in_dim(x, like.shape, tuple(range(x.ndim)))


def _scores(
    q: jax.Array, k: jax.Array, bias: tuple[jax.Array, ...], causal: bool, scale: float
) -> jax.Array:
    """`[B, H, T, S]`, scaled, biased, masked with -inf; q is `[B, H, T, E]`."""
    batch, heads, num_queries, _ = q.shape
    raw = _product(_by_kv_head(q, k.shape[1]), k, 3, 3)
    scores = lax.reshape(raw, (batch, heads, num_queries, k.shape[2]))
    scores = lax.mul(scores, lax.full_like(scores, scale))
    for b in bias:
        full = lax.broadcast_in_dim(cast(b, scores.dtype), scores.shape, (0, 1, 2, 3))
        scores = lax.add(scores, full)
    if causal:
        row, column = (lax.broadcasted_iota(np.int32, scores.shape, d) for d in (2, 3))
        scores = lax.select(lax.le(column, row), scores, lax.full_like(scores, -np.inf))
    return scores


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array, causal: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    scores = _scores(q, k, bias, causal, scale)
    top = lax.reduce(scores, np.asarray(-np.inf, scores.dtype), lax.max, (3,))
    unseen = lax.eq(top, lax.full_like(top, -np.inf))
    safe_top = lax.select(unseen, lax.full_like(top, 0), top)
    shifted = lax.exp(lax.sub(scores, _over(safe_top, scores)))
    total = lax.reduce(shifted, np.asarray(0, scores.dtype), lax.add, (3,))
    safe_total = lax.select(unseen, lax.full_like(total, 1), total)
    lse = lax.select(unseen, top, lax.add(lax.log(safe_total), safe_top))
    weights = lax.div(shifted, _over(safe_total, shifted))
    rows = _by_kv_head(weights, k.shape[1])
    # In f32 as the op means it: weights rounded to a narrow dtype would lose digits.
    out = _product(rows, widen(v), 3, 2)
    return cast(lax.reshape(out, (*q.shape[:3], v.shape[3])), q.dtype), lse


def _backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    *bias: jax.Array,
    causal: bool,
    scale: float,
    bias_grad: bool = False,
) -> tuple[jax.Array, ...]:
    num_kv_heads = k.shape[1]
    scores = _scores(q, k, bias, causal, scale)
    unseen = lax.eq(lse, lax.full_like(lse, -np.inf))
    seen = lax.sub(scores, _over(lse, scores))
    weights = lax.select(_over(unseen, scores), lax.full_like(scores, 0), lax.exp(seen))
    zero = np.asarray(0, scores.dtype)
    delta = lax.reduce(lax.mul(widen(grad), widen(out)), zero, lax.add, (3,))
    grad_rows = widen(_by_kv_head(grad, num_kv_heads))
    d_weights = lax.reshape(_product(grad_rows, widen(v), 3, 3), scores.shape)
    d_scores = lax.mul(weights, lax.sub(d_weights, _over(delta, scores)))
    scaled = _by_kv_head(lax.mul(d_scores, lax.full_like(d_scores, scale)), num_kv_heads)
    d_q = lax.reshape(_product(scaled, widen(k), 3, 2), q.shape)
    d_k = _product(scaled, widen(_by_kv_head(q, num_kv_heads)), 2, 2)
    d_v = _product(_by_kv_head(weights, num_kv_heads), grad_rows, 2, 2)
    grads = [cast(d_q, q.dtype), cast(d_k, k.dtype), cast(d_v, v.dtype)]
    if bias_grad:
        (b,) = bias
        shared = tuple(d for d in _BATCH if b.shape[d] == 1)
        summed = lax.reduce(d_scores, zero, lax.add, shared)
        grads.append(cast(lax.reshape(summed, b.shape), b.dtype))
    return tuple(grads)


TABLE: Table = {ops.attention: many(_attention), ops.attention_backward: many(_backward)}
