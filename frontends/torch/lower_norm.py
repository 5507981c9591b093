"""Lowering of normalisations and their gradients to primitive ops, so that the gradients of weights stand apart."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.lower_reduce import spread, total, variance
from plait.frontends.torch.rules import Result, Rules, Site

aten = torch.ops.aten


def _results(s: Site, values: Sequence[Value | None]) -> list[Value | None]:
    """Each value in the dtype and shape torch gives it."""
    return [
        v if v is None or t is None else s.b.reshape(s.b.convert(v, t.dtype), t.shape)
        for v, t in zip(values, s.types, strict=True)
    ]


def _normalised(s: Site, x: Value, mean: Value, rstd: Value, dims: Sequence[int]) -> Value:
    shape = x.type.shape
    return s(ew.mul, s(ew.sub, x, spread(s, mean, shape, dims)), spread(s, rstd, shape, dims))


def _moments(s: Site, x: Value, dims: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """Mean, variance and 1 / sqrt(variance + eps) over dims."""
    var, mean = variance(s, x, tuple(dims), 0, keepdim=False)
    return mean, var, s(ew.rsqrt, s.add(var, eps))


def _affine(
    s: Site, x: Value, weight: Value | None, bias: Value | None, dims: Sequence[int]
) -> Value:
    """x * weight + bias, whose dims are `dims` of x."""
    if weight is not None:
        x = s(ew.mul, x, s.b.expand(s.b.convert(weight, x.type.dtype), x.type.shape, dims))
    if bias is not None:
        x = s(ew.add, x, s.b.expand(s.b.convert(bias, x.type.dtype), x.type.shape, dims))
    return x


def _input_grad(s: Site, grad: Value, x_hat: Value, rstd: Value, dims: Sequence[int]) -> Value:
    """rstd (g - mean(g) - x_hat mean(g x_hat)): through mean and variance over dims."""
    shape, count = grad.type.shape, math.prod(grad.type.shape[d] for d in dims)
    mean = s.div(total(s, grad, dims), count)
    along = s.div(total(s, s(ew.mul, grad, x_hat), dims), count)
    rest = s(ew.sub, grad, spread(s, mean, shape, dims))
    rest = s(ew.sub, rest, s(ew.mul, x_hat, spread(s, along, shape, dims)))
    return s(ew.mul, rest, spread(s, rstd, shape, dims))


def _lift(s: Site, *xs: Value) -> tuple[Value, ...]:
    wide = compute_dtype(xs[0].type.dtype)
    return tuple(s.b.convert(x, wide) for x in xs)


def _others(x: Value, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(x.type.rank) if d not in dims)


# Layer norm: over the last dims.


def layer_norm(
    s: Site, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> Result:
    (x,) = _lift(s, x)
    dims = tuple(range(x.type.rank - len(shape), x.type.rank))
    mean, _, rstd = _moments(s, x, dims, eps)
    out = _affine(s, _normalised(s, x, mean, rstd, dims), weight, bias, dims)
    return _results(s, (out, mean, rstd))


def layer_norm_backward(
    s: Site,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> Result:
    grad, x, mean, rstd = _lift(s, grad, x, mean, rstd)
    dims = tuple(range(x.type.rank - len(shape), x.type.rank))
    lead = _others(x, dims)
    mean, rstd = (s.b.reshape(v, x.type.shape[: len(lead)]) for v in (mean, rstd))
    x_hat = _normalised(s, x, mean, rstd, dims)
    scaled = _affine(s, grad, weight, None, dims)
    return _results(
        s,
        (
            _input_grad(s, scaled, x_hat, rstd, dims) if output_mask[0] else None,
            total(s, s(ew.mul, grad, x_hat), lead) if output_mask[1] else None,
            total(s, grad, lead) if output_mask[2] else None,
        ),
    )


# RMS norm: over the last dims, without a mean.


def rms_norm(
    s: Site, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None
) -> Result:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    (x,) = _lift(s, x)
    dims = tuple(range(x.type.rank - len(shape), x.type.rank))
    square = s.div(total(s, s(ew.mul, x, x), dims), math.prod(shape))
    rstd = s(ew.rsqrt, s.add(square, eps))
    out = s(ew.mul, x, spread(s, rstd, x.type.shape, dims))
    return _results(s, (_affine(s, out, weight, None, dims), rstd))


def rms_norm_backward(
    s: Site,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    rstd: Value,
    weight: Value | None,
    output_mask: Sequence[bool],
) -> Result:
    grad, x, rstd = _lift(s, grad, x, rstd)
    dims = tuple(range(x.type.rank - len(shape), x.type.rank))
    lead = _others(x, dims)
    rstd = spread(s, s.b.reshape(rstd, x.type.shape[: len(lead)]), x.type.shape, dims)
    x_hat = s(ew.mul, x, rstd)
    scaled = _affine(s, grad, weight, None, dims)
    along = s.div(total(s, s(ew.mul, scaled, x_hat), dims), math.prod(shape))
    rest = s(ew.sub, scaled, s(ew.mul, x_hat, spread(s, along, x.type.shape, dims)))
    return _results(
        s,
        (
            s(ew.mul, rest, rstd) if output_mask[0] else None,
            total(s, s(ew.mul, grad, x_hat), lead) if output_mask[1] else None,
        ),
    )


# Group norm: x [N, C, *] as [N, groups, C / groups, *].


def group_norm(
    s: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    num: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> Result:
    shape = x.type.shape
    (x,) = _lift(s, x)
    grouped = s.b.reshape(x, (num, groups, channels // groups, size))
    mean, _, rstd = _moments(s, grouped, (2, 3), eps)
    out = s.b.reshape(_normalised(s, grouped, mean, rstd, (2, 3)), (num, channels, size))
    out = s.b.reshape(_affine(s, out, weight, bias, (1,)), shape)
    return _results(s, (out, mean, rstd))


def group_norm_backward(
    s: Site,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    num: int,
    channels: int,
    size: int,
    groups: int,
    output_mask: Sequence[bool],
) -> Result:
    grad, x, mean, rstd = _lift(s, grad, x, mean, rstd)
    flat, grouped = (num, channels, size), (num, groups, channels // groups, size)
    grad = s.b.reshape(grad, flat)
    x_hat = _normalised(s, s.b.reshape(x, grouped), mean, rstd, (2, 3))
    scaled = s.b.reshape(_affine(s, grad, weight, None, (1,)), grouped)
    product = s(ew.mul, grad, s.b.reshape(x_hat, flat))
    return _results(
        s,
        (
            _input_grad(s, scaled, x_hat, rstd, (2, 3)) if output_mask[0] else None,
            total(s, product, (0, 2)) if output_mask[1] else None,
            total(s, grad, (0, 2)) if output_mask[2] else None,
        ),
    )


# Batch norm: over all dims but the channels.


def _batch_norm(
    s: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value | None, Value | None, Value | None, Value | None]:
    """Output, the mean and 1 / std of this batch, and the running statistics after it."""
    (x,) = _lift(s, x)
    wide, dims = x.type.dtype, _others(x, (1,))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean = s.b.convert(running_mean, wide)
        rstd = s(ew.rsqrt, s.add(s.b.convert(running_var, wide), eps))
        out = _affine(s, _normalised(s, x, mean, rstd, dims), weight, bias, (1,))
        return out, None, None, running_mean, running_var
    mean, var, rstd = _moments(s, x, dims, eps)
    out = _affine(s, _normalised(s, x, mean, rstd, dims), weight, bias, (1,))
    count = math.prod(x.type.shape[d] for d in dims)
    unbiased = s.mul(var, count / (count - 1) if count > 1 else math.nan)
    return (
        out,
        mean,
        rstd,
        _moved(s, running_mean, mean, momentum),
        _moved(s, running_var, unbiased, momentum),
    )


def _moved(s: Site, running: Value | None, now: Value, momentum: float) -> Value | None:
    if running is None:
        return None
    kept = s.mul(s.b.convert(running, now.type.dtype), 1 - momentum)
    return s.b.convert(s(ew.add, s.mul(now, momentum), kept), running.type.dtype)


def batch_norm_functional(
    s: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> Result:
    results = _batch_norm(s, x, weight, bias, running_mean, running_var, training, momentum, eps)
    return _or_empty(s, results)


def _or_empty(s: Site, results: Sequence[Value | None]) -> Result:
    """Statistics that were not computed are tensors without elements."""
    return _results(
        s,
        [
            s.b.full(t, 0) if v is None and t is not None else v
            for v, t in zip(results, s.types, strict=True)
        ],
    )


def batch_norm_no_stats(
    s: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Result:
    return _or_empty(s, _batch_norm(s, x, weight, bias, None, None, True, momentum, eps)[:3])


def batch_norm_no_training(
    s: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> Result:
    results = _batch_norm(s, x, weight, bias, running_mean, running_var, False, momentum, eps)
    return _or_empty(s, results[:3])


def batch_norm_with_update(
    s: Site,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> Result:
    out, mean, rstd, *running = _batch_norm(
        s, x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return _or_empty(s, (out, mean, rstd, None, *running))


def batch_norm_backward(
    s: Site,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_rstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    *_: Any,
) -> Result:
    grad, x = _lift(s, grad, x)
    wide, dims = x.type.dtype, _others(x, (1,))
    mean, rstd = (save_mean, save_rstd) if train else (running_mean, running_var)
    assert mean is not None
    assert rstd is not None
    mean, rstd = s.b.convert(mean, wide), s.b.convert(rstd, wide)
    if not train:
        rstd = s(ew.rsqrt, s.add(rstd, eps))
    x_hat = _normalised(s, x, mean, rstd, dims)
    scaled = _affine(s, grad, weight, None, (1,))
    if train:
        grad_x = _input_grad(s, scaled, x_hat, rstd, dims)
    else:
        grad_x = s(ew.mul, scaled, spread(s, rstd, x.type.shape, dims))
    return _results(
        s,
        (
            grad_x if output_mask[0] else None,
            total(s, s(ew.mul, grad, x_hat), dims) if output_mask[1] else None,
            total(s, grad, dims) if output_mask[2] else None,
        ),
    )


RULES: Rules = {
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten._native_batch_norm_legit.no_stats: batch_norm_no_stats,
    aten._native_batch_norm_legit_no_training.default: batch_norm_no_training,
    aten._batch_norm_with_update_functional.default: batch_norm_with_update,
    aten.native_batch_norm_backward.default: batch_norm_backward,
}
