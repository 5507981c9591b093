"""Emitters of convolution and its two gradients: aten.convolution and, one half at a time, convolution_backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.backends.torch.carriers import wrap
from plait.backends.torch.emit_shape import pad_with
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.ops import convolution as ops

Padding = Sequence[Sequence[int]]


def _pad(x: Tensor, padding: Padding, interior: Sequence[int]) -> Tensor:
    low, high = ([0, 0, *(pair[i] for pair in padding)] for i in (0, 1))
    return pad_with(x, 0, low, high, [0, 0, *interior])


def _symmetric(padding: Padding) -> list[int] | None:
    """The padding as torch's kernels take it: the same on both sides, and no cropping."""
    if all(low == high >= 0 for low, high in padding):
        return [low for low, _ in padding]
    return None


def _require_kernel(call: Call) -> None:
    """torch convolves floats; on the CPU integers too, but has no gradient of that."""
    kind = call.dtype.kind
    counts = kind in ("signed", "unsigned")
    if kind != "float" and not (
        counts and call.eqn.op is ops.convolution and call.device.type == "cpu"
    ):
        raise UnsupportedError(
            f"{call.eqn.op} of {call.dtype}: torch has no such kernel on {call.device.type}; convert to f32 before it"
        )


def _convolution(call: Call, x: Tensor, w: Tensor) -> Tensor:
    _require_kernel(call)
    attrs, groups = call.attrs, call.attrs["groups"]
    batch_groups = attrs.get("batch_groups", 1)
    if call.result.size == 0 or x.numel() == 0 or w.numel() == 0:
        return x.new_zeros(call.result.shape)
    if batch_groups > 1:  # groups of the batch become groups of channels
        parts = x.reshape(batch_groups, -1, *x.shape[1:]).transpose(0, 1)
        x, groups = parts.flatten(1, 2), batch_groups
    strides, dilation, padding = attrs["strides"], attrs["rhs_dilation"], attrs["padding"]
    lhs_dilation = attrs["lhs_dilation"]
    zeros = [0] * len(strides)
    transposed = _as_transposed(call, groups)
    if transposed is not None:
        pads, extra = transposed
        flipped = torch.flip(w, tuple(range(2, w.dim()))).transpose(0, 1)
        out = _convolve(x, flipped, lhs_dilation, pads, dilation, True, extra, 1)
        return wrap(out, call.dtype)
    same = _symmetric(padding) if max(lhs_dilation) == 1 else None
    if same is None:
        x = _pad(x, padding, [d - 1 for d in lhs_dilation])
    out = _convolve(x, w, strides, same or zeros, dilation, False, zeros, groups)
    return wrap(out, call.dtype)


def _convolve(
    x: Tensor,
    w: Tensor,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    extra: Sequence[int],
    groups: int,
) -> Tensor:
    out: Tensor = torch.ops.aten.convolution(
        x, w, None, list(strides), list(padding), list(dilation), transposed, list(extra), groups
    )
    return out


def _as_transposed(call: Call, groups: int) -> tuple[list[int], list[int]] | None:
    """Padding and output padding of the transposed convolution that this one with lhs_dilation is, where it is one."""
    attrs = call.attrs
    if groups != 1 or max(attrs["strides"]) > 1 or max(attrs["lhs_dilation"]) == 1:
        return None
    if not call.dtype.is_inexact:
        return None
    kernel = call.type(1).shape[2:]
    reach = [d * (k - 1) for d, k in zip(attrs["rhs_dilation"], kernel, strict=True)]
    pads = [r - low for r, (low, _) in zip(reach, attrs["padding"], strict=True)]
    extra = [high - low for low, high in attrs["padding"]]
    steps = zip(attrs["lhs_dilation"], attrs["rhs_dilation"], strict=True)
    fits = all(0 <= e < max(step) for e, step in zip(extra, steps, strict=True))
    return (pads, extra) if min(pads) >= 0 and fits else None


def _backward(
    call: Call, grad: Tensor, x: Tensor, w: Tensor, padding: Sequence[int], mask: list[bool]
) -> Tensor:
    attrs = call.attrs
    zeros = [0] * len(padding)
    strides, dilation = list(attrs["strides"]), list(attrs["rhs_dilation"])
    grads = torch.ops.aten.convolution_backward(
        *(grad, x, w, None, strides, list(padding), dilation, False, zeros, attrs["groups"], mask)
    )
    wanted: Tensor = grads[mask.index(True)]
    return wanted


def _input_grad(call: Call, grad: Tensor, w: Tensor) -> Tensor:
    _require_kernel(call)
    attrs, shape = call.attrs, call.result.shape
    if call.result.size == 0 or grad.numel() == 0 or w.numel() == 0:
        return grad.new_zeros(shape)
    padding = attrs["padding"]
    pads = _symmetric(padding)
    if pads is not None:  # of x, the kernel reads the shape alone
        return _backward(call, grad, grad.new_empty(shape), w, pads, [True, False, False])
    padded = [n + low + high for n, (low, high) in zip(shape[2:], padding, strict=True)]
    x = grad.new_empty((*shape[:2], *padded))
    out = _backward(call, grad, x, w, [0] * len(padded), [True, False, False])
    return _pad(out, [(-low, -high) for low, high in padding], [0] * len(padded))


def _weight_grad(call: Call, x: Tensor, grad: Tensor) -> Tensor:
    _require_kernel(call)
    attrs, shape = call.attrs, call.result.shape
    if call.result.size == 0 or grad.numel() == 0 or x.numel() == 0:
        return grad.new_zeros(shape)
    pads = _symmetric(attrs["padding"])
    if pads is None:
        x, pads = _pad(x, attrs["padding"], [0] * (x.dim() - 2)), [0] * (x.dim() - 2)
    return _backward(call, grad, x, grad.new_empty(shape), pads, [False, True, False])


EMITTERS: Table = {
    ops.convolution: _convolution,
    ops.convolution_input_grad: _input_grad,
    ops.convolution_weight_grad: _weight_grad,
}
