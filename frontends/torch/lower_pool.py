"""Lowering of pooling: windows over the spatial dims."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import window as win
from plait.core_ir.types import TensorType
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.lower_reduce import spread
from plait.frontends.torch.rules import Operand, Rule, Rules, Site

aten = torch.ops.aten


def _batched(rule: Callable[..., Any], rank: int) -> Rule:
    """A rule over inputs [N, C, *spatial], applied to inputs [C, *spatial] too."""

    def wrapped(s: Site, *args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if first.type.rank == rank:
            return rule(s, *args, **kwargs)
        types = [None if t is None else t.with_shape((1, *t.shape)) for t in s.types]
        lifted = [_with_batch(s, a) if isinstance(a, Value) else a for a in args]
        result = rule(replace(s, types=tuple(types)), *lifted, **kwargs)
        if isinstance(result, Value):
            return s.b.reshape(result, s.type.shape)
        return result if result is NotImplemented else [s.b.reshape(result[0], s.type.shape), None]

    return wrapped


def _with_batch(s: Site, x: Value) -> Value:
    return s.b.reshape(x, (1, *x.type.shape))


def _window(
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    extra: Sequence[int] = (),
) -> dict[str, Any]:
    """Attributes of reduce_window over the last dims; `extra` is more padding at the end (ceil_mode)."""
    rank = len(kernel)
    lead = x.type.rank - rank
    stride = stride or kernel
    pads = [_at(padding, i) for i in range(rank)]
    more = extra or (0,) * rank
    return {
        "window": (1,) * lead + tuple(kernel),
        "strides": (1,) * lead + tuple(_at(stride, i) for i in range(rank)),
        "padding": ((0, 0),) * lead + tuple((p, p + m) for p, m in zip(pads, more, strict=True)),
        "window_dilation": (1,) * lead + tuple(_at(dilation, i) for i in range(rank)),
    }


def _at(sizes: Sequence[int], i: int) -> int:
    return sizes[0] if len(sizes) == 1 else sizes[i]


def _each(kernel: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(_at(kernel, i) for i in range(rank))


def _excess(
    x: Value,
    out: TensorType,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
) -> tuple[int, ...]:
    """How far the last window reaches beyond the padded input: with ceil_mode it may; negative where it stops short."""
    rank = len(kernel)
    result = []
    for i in range(rank):
        size, count = x.type.shape[i - rank], out.shape[i - rank]
        reach = (count - 1) * _at(stride or kernel, i) + (kernel[i] - 1) * _at(dilation, i) + 1
        result.append(max(reach - size - 2 * _at(padding, i), 0))
    return tuple(result)


_MAX_GRADIENTS = (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
)


def max_pool(
    s: Site,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Values alone; the places are made again by the gradient. Read by anything else, the op stays extern."""
    if s.reads(1, *_MAX_GRADIENTS):
        return NotImplemented
    kernel = _each(kernel, x.type.rank - 2)
    extra = _excess(x, s.type, kernel, stride, padding, dilation)
    window = _window(x, kernel, stride, padding, dilation, extra)
    base = (1,) * x.type.rank
    return s(win.reduce_window, x, kind="max", base_dilation=base, **window), None


def max_pool_backward(
    s: Site,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value | None,
) -> Any:
    if any(d != 1 for d in dilation):
        return NotImplemented
    kernel = _each(kernel, x.type.rank - 2)
    extra = _excess(x, grad.type, kernel, stride, padding)
    window = _window(x, kernel, stride, padding, extra=extra)
    del window["window_dilation"]
    return s(win.select_and_scatter_add, grad, x, **window)


def avg_pool(
    s: Site,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    wide = compute_dtype(x.type.dtype)
    x = s.b.convert(x, wide)
    sums = _window_sum(s, x, s.type, kernel, stride, padding)
    counts = _counts(s, x, s.type, kernel, stride, padding, count_include_pad, divisor_override)
    return s.b.convert(s.div(sums, counts), s.type.dtype)


def _window_sum(
    s: Site,
    x: Value,
    out: TensorType,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Value:
    kernel = _each(kernel, x.type.rank - 2)
    window = _window(x, kernel, stride, padding, extra=_excess(x, out, kernel, stride, padding))
    return s(win.reduce_window, x, kind="sum", base_dilation=(1,) * x.type.rank, **window)


def _counts(
    s: Site,
    x: Value,
    out: TensorType,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    divisor_override: int | None,
) -> Operand:
    """By what each window's sum is divided: one number, or as many elements as the window has inside."""
    if divisor_override:
        return divisor_override
    kernel = _each(kernel, x.type.rank - 2)
    if not any(padding) and not any(_excess(x, out, kernel, stride, padding)):
        return math.prod(kernel)
    sides = []
    for i in range(len(kernel)):
        size, count = x.type.shape[i - len(kernel)], out.shape[i - len(kernel)]
        pad, step = _at(padding, i), _at(stride or kernel, i)
        starts = [j * step - pad for j in range(count)]
        low, high = (-pad, size + pad) if count_include_pad else (0, size)
        sides.append([min(at + kernel[i], high) - max(at, low) for at in starts])
    return s.b.literal(functools.reduce(np.multiply.outer, map(np.asarray, sides)), x.type.dtype)


def avg_pool_backward(
    s: Site,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    """A window sum over the divided cotangent, dilated by the stride: the transpose of the forward's window sum."""
    wide = compute_dtype(grad.type.dtype)
    rank, kernel = grad.type.rank, _each(kernel, grad.type.rank - 2)
    args = (kernel, stride, padding, count_include_pad, divisor_override)
    scaled = s.b.convert(grad, wide)
    scaled = s.div(scaled, _counts(s, s.b.convert(x, wide), grad.type, *args))
    spatial = range(len(kernel))
    strides = [_at(stride or kernel, i) for i in spatial]
    low = [kernel[i] - 1 - _at(padding, i) for i in spatial]
    size = [(grad.type.shape[2 + i] - 1) * strides[i] + 1 for i in spatial]
    high = [x.type.shape[2 + i] - size[i] - low[i] + kernel[i] - 1 for i in spatial]
    lead = 2
    out = s(
        win.reduce_window,
        scaled,
        kind="sum",
        window=(1,) * lead + kernel,
        strides=(1,) * rank,
        padding=((0, 0),) * lead + tuple(zip(low, high, strict=True)),
        base_dilation=(1,) * lead + tuple(strides),
        window_dilation=(1,) * rank,
    )
    return s.b.convert(out, s.type.dtype)


def adaptive_avg_pool2d_backward(s: Site, grad: Value, x: Value) -> Any:
    """Each element's share of the windows that hold it: windows of equal size only, others by torch's own op."""
    sizes, counts = x.type.shape[-2:], grad.type.shape[-2:]
    if any(n % c for n, c in zip(sizes, counts, strict=True)):
        return NotImplemented
    window = [n // c for n, c in zip(sizes, counts, strict=True)]
    wide = compute_dtype(grad.type.dtype)
    lead = grad.type.shape[:-2]
    share = s.div(s.b.convert(grad, wide), window[0] * window[1])
    shape = (*lead, counts[0], window[0], counts[1], window[1])
    rank = len(shape)
    spreaded = spread(s, share, shape, (rank - 3, rank - 1))
    return s.b.convert(s.b.reshape(spreaded, x.type.shape), s.type.dtype)


RULES: Rules = {
    aten.max_pool2d_with_indices.default: _batched(max_pool, 4),
    aten.max_pool3d_with_indices.default: _batched(max_pool, 5),
    aten.max_pool2d_with_indices_backward.default: _batched(max_pool_backward, 4),
    aten.max_pool3d_with_indices_backward.default: _batched(max_pool_backward, 5),
    aten.avg_pool2d.default: _batched(avg_pool, 4),
    aten.avg_pool3d.default: _batched(avg_pool, 5),
    aten.avg_pool2d_backward.default: _batched(avg_pool_backward, 4),
    aten.avg_pool3d_backward.default: _batched(avg_pool_backward, 5),
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
}
