"""Lowering of attention: every fused kernel is one op here; one with dropout is composed, its mask made by key."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import attention as at
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import TensorType, bool_, i64
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.lower_linalg import dot
from plait.frontends.torch.lower_random import bernoulli_mask
from plait.frontends.torch.rules import Hidden, Result, Rules, Site

aten = torch.ops.aten


def _scale(q: Value, scale: float | None) -> float:
    return 1 / math.sqrt(q.type.shape[-1]) if scale is None else float(scale)


def _bias(s: Site, q: Value, k: Value, mask: Value | None) -> tuple[Value, ...]:
    """The mask as numbers to add, [B or 1, H or 1, T, S]."""
    if mask is None:
        return ()
    if mask.type.dtype == bool_:
        zero = mask.type.with_dtype(q.type.dtype)
        mask = s.select(mask, 0.0, -math.inf, zero)
    lead = (1,) * (4 - mask.type.rank)
    shape = (*(*lead, *mask.type.shape)[:2], q.type.shape[2], k.type.shape[2])
    return (s.b.expand(s.b.reshape(mask, (*lead, *mask.type.shape)), shape),)


def _attention(
    s: Site,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
) -> tuple[Value, Value, Value | None]:
    """Output, log-sum-exp as torch shapes it, and the key of the dropout mask."""
    bias = _bias(s, q, k, mask)
    if dropout_p:
        key = s.new_key()
        weights, lse = _weights(s, q, k, bias, causal, _scale(q, scale))
        kept = _drop(s, weights, key, dropout_p)
        out = dot(s, kept, s.b.convert(v, kept.type.dtype), (3, 2), batch=2)
        return s.b.convert(out, q.type.dtype), _shaped_lse(s, lse), key
    out, lse = s.b.emit(at.attention, q, k, v, *bias, causal=causal, scale=_scale(q, scale))
    return out, _shaped_lse(s, lse), None


def _weights(
    s: Site, q: Value, k: Value, bias: Sequence[Value], causal: bool, scale: float
) -> tuple[Value, Value]:
    """Softmax of the scores, and their log-sum-exp, from composed ops."""
    wide = compute_dtype(q.type.dtype)
    scores = s.mul(dot(s, s.b.convert(q, wide), s.b.convert(k, wide), (3, 3), batch=2), scale)
    for extra in bias:
        scores = s.add(scores, extra)
    if causal:
        rows, columns = (s(sh.iota, dtype=i64, shape=scores.type.shape, dim=d) for d in (2, 3))
        seen = s(ew.compare, columns, rows, direction="le")
        scores = s.select(seen, scores, -math.inf, scores.type)
    top = s(rd.reduce_max, scores, dims=(3,))
    safe = s.select(s(ew.is_finite, top), top, 0, top.type)
    exps = s(ew.exp, s(ew.sub, scores, _along(s, safe, scores)))
    total = s(rd.reduce_sum, exps, dims=(3,))
    lse = s(ew.add, s(ew.log, total), safe)
    weights = s(
        ew.div, exps, _along(s, s.select(s.compare("eq", total, 0), 1, total, total.type), scores)
    )
    return weights, lse


def _along(s: Site, x: Value, like: Value) -> Value:
    return s.b.expand(x, like.type.shape, (0, 1, 2))


def _drop(s: Site, x: Value, key: Value, p: float) -> Value:
    """x with a fraction p of its elements set to 0, the others scaled."""
    kept = s.select(bernoulli_mask(s, key, x.type.shape, 1 - p), x, 0, x.type)
    return s.mul(kept, 1 / (1 - p) if p < 1 else 0.0)


def _shaped_lse(s: Site, lse: Value) -> Value:
    """Some kernels pad the queries of their log-sum-exp, or add a dim."""
    wanted = s.types[1]
    if wanted is None or wanted.size == 0:
        return lse
    extra = wanted.shape[2] - lse.type.shape[2]
    if extra:
        low, high = (0, 0, 0), (0, 0, extra)
        zero = s.b.literal(0, lse.type.dtype)
        lse = s(sh.pad, lse, zero, low=low, high=high, interior=low)
    return s.b.reshape(lse, wanted.shape)


def _plain_lse(s: Site, lse: Value, q: Value) -> Value:
    """[B, H, T] again."""
    shape = (*lse.type.shape[:2], lse.type.shape[2])
    lse = s.b.reshape(lse, shape)
    length = q.type.shape[2]
    if lse.type.shape[2] == length:
        return lse
    limit = (*shape[:2], length)
    return s(sh.slice_, lse, start=(0, 0, 0), limit=limit, strides=(1, 1, 1))


def _attention_backward(
    s: Site,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    out: Value,
    lse: Value,
    key: Value | None,
    dropout_p: float,
    causal: bool,
    scale: float | None,
    bias_grad: bool = False,
) -> Result:
    bias = _bias(s, q, k, mask)
    if dropout_p:
        assert key is not None
        return _dropped_backward(
            s, grad, q, k, v, bias, out, key, dropout_p, causal, _scale(q, scale), bias_grad
        )
    lse = _plain_lse(s, lse, q)
    attrs: dict[str, Any] = {"causal": causal, "scale": _scale(q, scale)}
    if bias_grad:
        attrs["bias_grad"] = True
    results = s.b.emit(at.attention_backward, grad, q, k, v, out, lse, *bias, **attrs)
    if bias_grad and mask is not None:
        return [*results[:3], _unbroadcast(s, results[3], mask.type)]
    return results


def _dropped_backward(
    s: Site,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    bias: Sequence[Value],
    out: Value,
    key: Value,
    p: float,
    causal: bool,
    scale: float,
    bias_grad: bool,
) -> Result:
    """The chain rule over the composed form; the mask comes from the same key."""
    weights, _ = _weights(s, q, k, bias, causal, scale)
    wide = weights.type.dtype
    g, q_, k_, v_, o = (s.b.convert(x, wide) for x in (grad, q, k, v, out))
    dv = dot(s, _drop(s, weights, key, p), g, (2, 2), batch=2)
    dweights = _drop(s, dot(s, g, v_, (3, 3), batch=2), key, p)
    delta = s(rd.reduce_sum, s(ew.mul, g, o), dims=(3,))
    dscores = s(ew.mul, weights, s(ew.sub, dweights, _along(s, delta, weights)))
    scaled = s.mul(dscores, scale)
    dq, dk = dot(s, scaled, k_, (3, 2), batch=2), dot(s, scaled, q_, (2, 2), batch=2)
    results: list[Value | None] = [s.b.convert(x, q.type.dtype) for x in (dq, dk, dv)]
    if bias_grad and bias:
        results.append(_unbroadcast(s, s.b.convert(dscores, bias[0].type.dtype), bias[0].type))
    return results


def _unbroadcast(s: Site, x: Value, type: TensorType) -> Value:
    lead = x.type.rank - type.rank
    shape = (1,) * lead + type.shape
    dims = tuple(i for i, d in enumerate(shape) if d != x.type.shape[i])
    return s.b.reshape(s(rd.reduce_sum, x, dims=dims) if dims else x, type.shape)


def flash_cpu(
    s: Site,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> Result:
    return _attention(s, q, k, v, attn_mask, dropout_p, is_causal, scale)[:2]


def flash_cpu_backward(
    s: Site,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> Result:
    return _attention_backward(
        s, grad, q, k, v, attn_mask, out, lse, None, dropout_p, is_causal, scale
    )


def flash(
    s: Site,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse, key = _attention(s, q, k, v, None, dropout_p, is_causal, scale)
    return [out, lse, None, None, None, None, _hidden(key), None, None]


def flash_backward(
    s: Site,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    key: Value | None,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Result:
    return _attention_backward(s, grad, q, k, v, None, out, lse, key, dropout_p, is_causal, scale)


def efficient(
    s: Site,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse, key = _attention(s, q, k, v, attn_bias, dropout_p, is_causal, scale)
    return [out, lse, _hidden(key), None]


def efficient_backward(
    s: Site,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    out: Value,
    lse: Value,
    key: Value | None,
    philox_offset: Any,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Result:
    with_bias = grad_input_mask[3] and attn_bias is not None
    return _attention_backward(
        s, grad, q, k, v, attn_bias, out, lse, key, dropout_p, is_causal, scale, with_bias
    )


def cudnn(
    s: Site,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse, key = _attention(s, q, k, v, attn_bias, dropout_p, is_causal, scale)
    return [out, lse, None, None, None, None, _hidden(key), None, None]


def cudnn_backward(
    s: Site,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    key: Value | None,
    philox_offset: Any,
    attn_bias: Value | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Result:
    return _attention_backward(
        s, grad, q, k, v, attn_bias, out, lse, key, dropout_p, is_causal, scale
    )


def _hidden(key: Value | None) -> Hidden | None:
    return None if key is None else Hidden(key)


RULES: Rules = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: flash_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_cpu_backward,
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}
