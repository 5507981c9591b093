"""Lowering of convolutions; their three gradients are three equations, so that they may stand in different tasks."""

from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import convolution as cv
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.frontends.torch.rules import Result, Rules, Site

aten = torch.ops.aten


def _pairs(padding: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    return tuple((p, p) for p in _each(padding, rank))


def _each(sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    return tuple(sizes) * rank if len(sizes) == 1 else tuple(sizes)


def convolution(
    s: Site,
    x: Value,
    w: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    """A transposed convolution is the input gradient of the convolution it transposes."""
    rank = x.type.rank - 2
    window = _window(rank, stride, padding, dilation, groups)
    if transposed:
        out = s(cv.convolution_input_grad, x, w, input_spatial=s.type.shape[2:], **window)
    else:
        out = s(cv.convolution, x, w, lhs_dilation=(1,) * rank, **window)
    return out if bias is None else s(ew.add, out, s.b.expand(bias, out.type.shape, (1,)))


def _window(
    rank: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> dict[str, Any]:
    return {
        "strides": _each(stride, rank),
        "padding": _pairs(padding, rank),
        "rhs_dilation": _each(dilation, rank),
        "groups": groups,
    }


def convolution_backward(
    s: Site,
    grad: Value,
    x: Value,
    w: Value,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Result:
    rank = x.type.rank - 2
    window = _window(rank, stride, padding, dilation, groups)
    grad_x = grad_w = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_x = s(cv.convolution, grad, w, lhs_dilation=(1,) * rank, **window)
        else:
            grad_x = s(cv.convolution_input_grad, grad, w, input_spatial=x.type.shape[2:], **window)
    if output_mask[1]:
        source, cotangent = (grad, x) if transposed else (x, grad)
        kernel = w.type.shape[2:]
        grad_w = s(cv.convolution_weight_grad, source, cotangent, kernel_spatial=kernel, **window)
    if output_mask[2]:
        dims = (0, *range(2, grad.type.rank))
        grad_bias = s(rd.reduce_sum, grad, dims=dims)
    return grad_x, grad_w, grad_bias


RULES: Rules = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
