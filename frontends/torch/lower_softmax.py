"""Lowering of softmax, log-softmax and log-sum-exp, with gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.lower_reduce import Dims, keeping, spread, total
from plait.frontends.torch.rules import (
    Rules,
    Site,
    dims_of,
    in_compute_dtype,
)

aten = torch.ops.aten


@in_compute_dtype
def logsumexp(s: Site, x: Value, dims: Dims, keepdim: bool = False) -> Value:
    x = s.b.convert(x, s.type.dtype)
    axes = dims_of(dims, x.type.rank)
    if not x.type.size:
        return s(ew.log, total(s, s(ew.exp, x), axes, keepdim))
    top = total(s, x, axes, op=rd.reduce_max)
    top = s.select(s(ew.is_finite, top), top, 0, top.type)
    sums = total(s, s(ew.exp, s(ew.sub, x, spread(s, top, x.type.shape, axes))), axes)
    result = s(ew.add, s(ew.log, sums), top)
    return s.b.reshape(result, keeping(x.type.shape, axes)) if keepdim else result


def _shifted(s: Site, x: Value, axes: Sequence[int]) -> Value:
    return s(ew.sub, x, spread(s, total(s, x, axes, op=rd.reduce_max), x.type.shape, axes))


def softmax(s: Site, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """exp(x - max) / sum, in f32 for 16-bit floats."""
    x = s.b.convert(x, compute_dtype(s.type.dtype))
    axes = dims_of(dim, x.type.rank)
    exps = s(ew.exp, _shifted(s, x, axes)) if x.type.size else x
    result = s(ew.div, exps, spread(s, total(s, exps, axes), x.type.shape, axes))
    return s.b.convert(result, s.type.dtype)


def log_softmax(s: Site, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """x - max - log(sum(exp(x - max)))."""
    x = s.b.convert(x, compute_dtype(s.type.dtype))
    axes = dims_of(dim, x.type.rank)
    if not x.type.size:
        return s.b.convert(x, s.type.dtype)
    rest = _shifted(s, x, axes)
    log = s(ew.log, total(s, s(ew.exp, rest), axes))
    return s.b.convert(s(ew.sub, rest, spread(s, log, x.type.shape, axes)), s.type.dtype)


def softmax_backward(s: Site, grad: Value, out: Value, dim: int, input_dtype: Any) -> Value:
    """out * (grad - sum(grad * out))."""
    wide = compute_dtype(out.type.dtype)
    grad, out = s.b.convert(grad, wide), s.b.convert(out, wide)
    axes = dims_of(dim, out.type.rank)
    product = s(ew.mul, grad, out)
    sums = spread(s, total(s, product, axes), out.type.shape, axes)
    return s.b.convert(s(ew.sub, product, s(ew.mul, out, sums)), s.type.dtype)


def log_softmax_backward(s: Site, grad: Value, out: Value, dim: int, input_dtype: Any) -> Value:
    """grad - exp(out) * sum(grad)."""
    wide = compute_dtype(out.type.dtype)
    grad, out = s.b.convert(grad, wide), s.b.convert(out, wide)
    axes = dims_of(dim, out.type.rank)
    sums = spread(s, total(s, grad, axes), out.type.shape, axes)
    result = s(ew.sub, grad, s(ew.mul, s(ew.exp, out), sums))
    return s.b.convert(result, s.type.dtype)


def safe_softmax(s: Site, x: Value, dim: int, dtype: Any = None) -> Value:
    """Softmax, but 0 where a whole row is -inf."""
    axes = dims_of(dim, x.type.rank)
    masked = total(s, s.compare("eq", x, -math.inf), axes, op=rd.reduce_and)
    masked = spread(s, masked, x.type.shape, axes)
    return s.select(masked, 0, softmax(s, s.b.convert(x, s.type.dtype), dim), s.type)


RULES: Rules = {
    aten.logsumexp.default: logsumexp,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: safe_softmax,
    aten._log_softmax.default: log_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
}
