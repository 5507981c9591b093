"""Scaled dot-product attention and its backward, each one op so that fused kernels survive.

Shapes: B batch, H query heads, Hk key and value heads, T queries, S keys, E head size, Ev value
head size. Query head h reads key and value head h // (H / Hk). Scores and softmax are in f32, in
f64 for f64 operands.
"""

from collections.abc import Sequence

import numpy as np

from plait.core_ir.op import Array, Attrs, Op, Run, Types, bool_attr, float_attr
from plait.core_ir.types import DType, TensorType, bf16, f16, f32, f64

_FLOATS = (f16, bf16, f32, f64)


def _score_dtype(dtype: DType) -> DType:
    return f64 if dtype == f64 else f32


def _require_attention(op: Op, q: TensorType, k: TensorType, v: TensorType, bias: Types) -> None:
    """Constraints 1 to 6, which attention and its backward share."""
    op.require(1, q.rank == k.rank == v.rank == 4, (q, k, v))
    op.require(2, q.dtype in _FLOATS and q.dtype == k.dtype == v.dtype, (q, k, v))
    op.require(3, q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3], (q, k, v))
    op.require(4, q.shape[3] == k.shape[3], (q, k))
    op.require(5, k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0, (q, k))
    for b in bias:
        batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        wide = b.rank == 4 and b.shape[0] in (1, batch) and b.shape[1] in (1, heads)
        op.require(6, wide and b.shape[2:] == (queries, keys) and b.dtype in _FLOATS, (b, q, k))


def _scores(q: Array, k: Array, bias: Sequence[Array], attrs: Attrs) -> Array:
    """Scaled, biased, masked: `[B, Hk, H / Hk, T, S]` of q `[B, Hk, H / Hk, T, E]`."""
    scores: Array = np.matmul(q, np.swapaxes(k, -1, -2)[:, :, None]) * q.dtype.type(attrs["scale"])
    if bias:
        full = (scores.shape[0], scores.shape[1] * scores.shape[2], *scores.shape[3:])
        scores += np.broadcast_to(bias[0].astype(q.dtype), full).reshape(scores.shape)
    if attrs["causal"]:
        scores[..., ~np.tri(*scores.shape[3:], dtype=np.bool_)] = -np.inf
    return scores


def _by_kv_head(x: Array, num_kv_heads: int) -> Array:
    """`[B, H, ...]` as `[B, Hk, H / Hk, ...]`."""
    return x.reshape(x.shape[0], num_kv_heads, x.shape[1] // num_kv_heads, *x.shape[2:])


def _seen_pairs(q: TensorType, k: TensorType, causal: bool) -> int:
    """Over all batches and heads, how many keys the queries see."""
    batch, heads, num_queries, num_keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    square = min(num_queries, num_keys)
    seen = square * (square + 1) // 2 + (num_queries - square) * num_keys
    return batch * heads * (seen if causal else num_queries * num_keys)


_CONSTRAINTS = (
    "q is [B, H, T, E], k is [B, Hk, S, E], v is [B, Hk, S, Ev]",
    "q, k and v have one dtype: f16, bf16, f32 or f64",
    "q, k and v have the same B; k and v have the same Hk and S",
    "q and k have the same E",
    "Hk divides H",
    "bias, where there is one, is floating point and [B or 1, H or 1, T, S]",
)


def _attention_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    attention.require(7, len(types) in (3, 4), f"{len(types)} operands")
    q, k, v, *bias = types
    _require_attention(attention, q, k, v, bias)
    out = q.with_shape((*q.shape[:3], v.shape[3]))
    return (out, TensorType(_score_dtype(q.dtype), q.shape[:3]))


def _attention_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    dtype = operands[0].dtype
    compute = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    q, k, v, *bias = (x.astype(compute) for x in operands)
    with np.errstate(all="ignore"):
        scores = _scores(_by_kv_head(q, k.shape[1]), k, bias, attrs)
        top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
        shifted = np.exp(scores - np.where(top == -np.inf, 0, top))
        total = np.sum(shifted, axis=-1, keepdims=True)
        lse = np.where(total == 0, -np.inf, np.log(total) + top)[..., 0].reshape(q.shape[:3])
        weights = np.where(total == 0, 0, shifted / total)
        out = np.matmul(weights, v[:, :, None]).reshape(*q.shape[:3], v.shape[3])
        return (out.astype(dtype), lse.astype(compute))


def _attention_flops(types: Types, attrs: Attrs, results: Types) -> int:
    q, k, v = types[:3]
    return 2 * _seen_pairs(q, k, attrs["causal"]) * (q.shape[3] + v.shape[3])


attention = Op(
    "attention",
    _attention_infer,
    _attention_evaluate,
    None,
    (bool_attr("causal"), float_attr("scale")),
    (
        *_CONSTRAINTS,
        "three operands q, k, v, or four with bias",
        "causal: query i sees key j where j <= i, counted from the first query and the first key",
        "a row that sees no key, or only keys of bias -inf, gives out 0 and log-sum-exp -inf",
    ),
    flops=_attention_flops,
    doc="(q, k, v[, bias]) -> (out [B, H, T, Ev] in the dtype of q, lse [B, H, T]): out = "
    "softmax(scale q k^T + bias) v over the keys that are seen, lse = the natural logarithm of the "
    "sum of exp of those scores, f32 (f64 for f64).",
)


def _backward_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    op = attention_backward
    op.require(7, len(types) in (6, 7), f"{len(types)} operands")
    grad, q, k, v, out, lse, *bias = types
    _require_attention(op, q, k, v, bias)
    op.require(8, grad == out == q.with_shape((*q.shape[:3], v.shape[3])), (grad, out, q, v))
    op.require(9, lse == TensorType(_score_dtype(q.dtype), q.shape[:3]), (lse, q))
    wants_bias = attrs.get("bias_grad", False)
    op.require(10, bool(bias) or not wants_bias, "no bias")
    return (q, k, v, *bias) if wants_bias else (q, k, v)


def _backward_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    compute = np.dtype(np.float64 if operands[1].dtype == np.float64 else np.float32)
    grad, q, k, v, out, lse, *bias = (x.astype(compute) for x in operands)
    shape, num_kv_heads = q.shape, k.shape[1]
    q, grad, out, lse = (_by_kv_head(x, num_kv_heads) for x in (q, grad, out, lse))
    lse = lse[..., None]
    with np.errstate(all="ignore"):
        scores = _scores(q, k, bias, attrs)
        weights = np.where(lse == -np.inf, 0, np.exp(scores - lse))
        delta = np.sum(grad * out, axis=-1, keepdims=True)
        d_scores = weights * (np.matmul(grad, np.swapaxes(v, -1, -2)[:, :, None]) - delta)
        d_v = np.matmul(np.swapaxes(weights, -1, -2), grad).sum(2)
        scaled = d_scores * compute.type(attrs["scale"])
        d_q = np.matmul(scaled, k[:, :, None]).reshape(shape)
        d_k = np.matmul(np.swapaxes(scaled, -1, -2), q).sum(2)
        grads = [d_q, d_k, d_v]
        if attrs.get("bias_grad", False):
            d_bias = d_scores.reshape(*shape[:3], k.shape[2])
            summed = tuple(d for d in (0, 1) if bias[0].shape[d] == 1)
            grads.append(d_bias.sum(summed, keepdims=True))
        wanted = [*operands[1:4], *operands[6:]]
        return tuple(g.astype(x.dtype) for g, x in zip(grads, wanted, strict=False))


def _backward_flops(types: Types, attrs: Attrs, results: Types) -> int:
    q, k, v = types[1:4]
    return 2 * _seen_pairs(q, k, attrs["causal"]) * (3 * q.shape[3] + 2 * v.shape[3])


attention_backward = Op(
    "attention_backward",
    _backward_infer,
    _backward_evaluate,
    None,
    (bool_attr("causal"), float_attr("scale"), bool_attr("bias_grad", optional=True)),
    (
        *_CONSTRAINTS,
        "six operands grad, q, k, v, out, lse, or seven with bias",
        "grad and out are [B, H, T, Ev] in the dtype of q",
        "lse is [B, H, T], f32 (f64 where q is f64)",
        "bias_grad is true only where there is a bias",
    ),
    flops=_backward_flops,
    doc="(grad, q, k, v, out, lse[, bias]) -> (dq, dk, dv[, dbias]): the gradients for the "
    "cotangent `grad` of out, from the results of attention on the same q, k, v, bias and "
    "attributes. Each has the type of its operand; dbias is summed where bias was broadcast, and "
    "given only with bias_grad=True.",
)

FAMILY: tuple[Op, ...] = (attention, attention_backward)
