"""Emitters of attention and its backward: a fused kernel of torch where one has exactly this meaning, else composed.

CPU: the flash kernel, for equal head sizes; it takes grouped heads and a bias, but says log-sum-exp 0 for a row that a
bias masks fully. CUDA, without bias: flash for f16 and bf16, memory-efficient for f32, causal only where there are as
many queries as keys (flash aligns the triangle at the other corner). Scores, softmax and sums are in f32 or f64.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.backends.torch.emitter import Call, Table
from plait.core_ir.ops import attention as ops
from plait.core_ir.types import TensorType, f32, f64

aten = torch.ops.aten


def _kernel(call: Call, q: TensorType, k: TensorType, v: TensorType, has_bias: bool) -> str:
    """Which kernel computes this: "cpu", "flash", "efficient" or "composed"."""
    if 0 in q.shape or 0 in k.shape or q.shape[3] != v.shape[3]:
        return "composed"
    if call.device.type == "cpu":
        return "cpu"
    square = q.shape[2] == k.shape[2]
    aligned = q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if call.device.type != "cuda" or has_bias or q.dtype == f64 or not aligned:
        return "composed"
    if call.attrs["causal"] and not square:
        return "composed"
    return "efficient" if q.dtype == f32 else "flash"


def _attention(call: Call, q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Sequence[Tensor]:
    causal, scale = call.attrs["causal"], call.attrs["scale"]
    kernel = _kernel(call, call.type(0), call.type(1), call.type(2), bool(bias))
    if kernel == "composed":
        return _composed(q, k, v, bias, causal, scale)
    if kernel == "cpu":
        mask = bias[0].to(_wide(q)) if bias else None
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, torch.where(_masked(bias[0], causal), -math.inf, lse) if bias else lse
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse.narrow(-1, 0, q.shape[2])  # the kernel rounds the number of queries up


def _attention_backward(
    call: Call,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *bias: Tensor,
) -> Sequence[Tensor]:
    causal, scale = call.attrs["causal"], call.attrs["scale"]
    bias_grad = call.attrs.get("bias_grad", False)
    kernel = _kernel(call, call.type(1), call.type(2), call.type(3), bool(bias))
    if kernel == "composed" or bias_grad:
        return _composed_backward(grad, q, k, v, out, lse, bias, causal, scale, bias_grad)
    if kernel == "cpu":
        mask = bias[0].to(_wide(q)) if bias else None
        if bias:
            lse = torch.where(lse == -math.inf, 0.0, lse)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return tuple(grads)
    num_groups = k.shape[1]
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is none
    if kernel == "flash":
        d_q, d_k, d_v = aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed),
            scale=scale,
        )
    else:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        d_q, d_k, d_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            *(grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal),
            scale=scale,
        )
    return d_q, _summed(d_k, num_groups), _summed(d_v, num_groups)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """`[B, Hk, ...]` as `[B, H, ...]`: each head for its whole group."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _summed(grad: Tensor, num_groups: int) -> Tensor:
    """`[B, H, ...]` as `[B, Hk, ...]`: the sum over each group, in f32."""
    if grad.shape[1] == num_groups:
        return grad
    return (
        grad.reshape(grad.shape[0], num_groups, -1, *grad.shape[2:])
        .sum(2, dtype=torch.float32)
        .to(grad.dtype)
    )


def _triangle(scores: Tensor) -> Tensor:
    """Which query sees which key under `causal`: bool [T, S] for scores [..., T, S]."""
    queries = torch.arange(scores.shape[-2], device=scores.device).unsqueeze(1)
    return torch.arange(scores.shape[-1], device=scores.device) <= queries


def _masked(bias: Tensor, causal: bool) -> Tensor:
    """Rows that see only keys of bias -inf, `[B|1, H|1, T]`."""
    shut = bias == -math.inf
    if causal:
        shut = shut | ~_triangle(bias)
    return torch.all(shut, -1)


def _scores(q: Tensor, k: Tensor, bias: Sequence[Tensor], causal: bool, scale: float) -> Tensor:
    """`[B, Hk, H / Hk, T, S]` of q `[B, Hk, H / Hk, T, E]` and k `[B, Hk, 1, S, E]`."""
    scores = torch.matmul(q, k.mT) * scale
    if bias:
        full = (scores.shape[0], scores.shape[1] * scores.shape[2], *scores.shape[3:])
        scores = scores + bias[0].to(scores.dtype).expand(full).reshape(scores.shape)
    if causal:
        scores = torch.where(_triangle(scores), scores, -math.inf)
    return scores


def _grouped(x: Tensor, num_groups: int, wide: torch.dtype) -> Tensor:
    """`[B, H, ...]` as `[B, Hk, H / Hk, ...]` in the dtype of scores."""
    return x.to(wide).reshape(x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:])


def _composed(
    q: Tensor, k: Tensor, v: Tensor, bias: Sequence[Tensor], causal: bool, scale: float
) -> Sequence[Tensor]:
    wide, num_groups = _wide(q), k.shape[1]
    shape = (*q.shape[:3], v.shape[3])
    if k.shape[2] == 0:
        return q.new_zeros(shape), torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
    keys, values = (x.to(wide).unsqueeze(2) for x in (k, v))
    scores = _scores(_grouped(q, num_groups, wide), keys, bias, causal, scale)
    top = torch.amax(scores, -1, keepdim=True)
    shifted = torch.exp(scores - torch.where(top == -math.inf, 0.0, top))
    total = torch.sum(shifted, -1, keepdim=True)
    seen = total != 0
    lse = torch.where(seen, torch.log(total) + top, -math.inf)
    weights = torch.where(seen, shifted / total, 0.0)
    out = torch.matmul(weights, values)
    return out.reshape(shape).to(q.dtype), lse.reshape(q.shape[:3])


def _composed_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Sequence[Tensor],
    causal: bool,
    scale: float,
    bias_grad: bool,
) -> Sequence[Tensor]:
    wide, num_groups = _wide(q), k.shape[1]
    queries, grads, outs = (_grouped(x, num_groups, wide) for x in (q, grad, out))
    keys, values = (x.to(wide).unsqueeze(2) for x in (k, v))
    log_sums = _grouped(lse, num_groups, wide).unsqueeze(-1)
    scores = _scores(queries, keys, bias, causal, scale)
    weights = torch.where(log_sums == -math.inf, 0.0, torch.exp(scores - log_sums))
    delta = torch.sum(grads * outs, -1, keepdim=True)
    d_scores = weights * (torch.matmul(grads, values.mT) - delta)
    scaled = d_scores * scale
    d_q = torch.matmul(scaled, keys).reshape(q.shape).to(q.dtype)
    d_k = torch.matmul(scaled.mT, queries).sum(2).to(k.dtype)
    d_v = torch.matmul(weights.mT, grads).sum(2).to(v.dtype)
    if not bias_grad:
        return d_q, d_k, d_v
    d_bias = d_scores.reshape(*q.shape[:3], k.shape[2])
    summed = [d for d in (0, 1) if bias[0].shape[d] == 1]
    if summed:
        d_bias = d_bias.sum(summed, keepdim=True)
    return d_q, d_k, d_v, d_bias.to(bias[0].dtype)


EMITTERS: Table = {
    ops.attention: _attention,
    ops.attention_backward: _attention_backward,
}
