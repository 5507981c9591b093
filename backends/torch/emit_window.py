"""Emitters of the window ops. A window is seen through `unfold`, one dimension after the other: a view."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.backends.torch.carriers import ordered
from plait.backends.torch.emit_reduce import highest, lowest, sum_of
from plait.backends.torch.emit_shape import pad_with
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.ops import window as ops
from plait.core_ir.types import DType


def _identity(kind: str, dtype: DType) -> Any:
    return {"sum": lambda d: 0, "max": lowest, "min": highest}[kind](dtype)


def _reduce_window(call: Call, x: Tensor) -> Tensor:
    """The window is a product of intervals, so it is reduced one dimension at a time."""
    attrs, dtype, kind = call.attrs, call.dtype, call.attrs["kind"]
    if call.result.size == 0:
        return x.new_zeros(call.result.shape)
    x = x if kind == "sum" else ordered(x, dtype)
    low, high = ([pair[i] for pair in attrs["padding"]] for i in (0, 1))
    gaps = [d - 1 for d in attrs["base_dilation"]]
    x = pad_with(x, _identity(kind, dtype), low, high, gaps)
    for dim, (size, step, spread) in enumerate(
        zip(attrs["window"], attrs["strides"], attrs["window_dilation"], strict=True)
    ):
        if (size, step) == (1, 1):
            continue
        view = x.unfold(dim, (size - 1) * spread + 1, step)
        if spread > 1:
            view = torch.ops.aten.slice.Tensor(view, -1, 0, None, spread)
        if kind == "sum":
            x = sum_of(view, -1, dtype)
        else:
            x = torch.amax(view, -1) if kind == "max" else torch.amin(view, -1)
    return x if kind == "sum" else ordered(x, dtype)


def _unfolded(x: Tensor, window: Sequence[int], strides: Sequence[int]) -> Tensor:
    """[*positions, places of the window in row-major order]."""
    for dim, (size, step) in enumerate(zip(window, strides, strict=True)):
        x = x.unfold(dim, size, step)
    return x.flatten(len(window)) if window else x.unsqueeze(-1)


def _select_and_scatter_add(call: Call, source: Tensor, x: Tensor) -> Tensor:
    attrs, dtype, rank = call.attrs, call.dtype, x.dim()
    if source.numel() == 0 or x.numel() == 0:
        return torch.zeros_like(x)
    window, strides = attrs["window"], attrs["strides"]
    low, high = ([pair[i] for pair in attrs["padding"]] for i in (0, 1))

    def windows(y: Tensor, number: Any) -> Tensor:
        return _unfolded(pad_with(y, number, low, high, [0] * rank), window, strides)

    values = windows(x, lowest(dtype))
    inside = windows(torch.ones_like(x, dtype=torch.bool), False)
    number = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    places = windows(number, x.numel())  # what is outside goes to an element of its own
    best = torch.amax(values, -1, keepdim=True)
    largest = (values == best) | (torch.isnan(values) & torch.isnan(best))
    chosen = torch.argmax((largest & inside).to(torch.uint8), -1, keepdim=True)
    target = torch.gather(places, -1, chosen).reshape(-1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros(x.numel() + 1, dtype=wide, device=x.device)
    total = total.index_put((target,), source.to(wide).reshape(-1), accumulate=True)
    return total.narrow(0, 0, x.numel()).reshape(x.shape).to(x.dtype)


EMITTERS: Table = {
    ops.reduce_window: _reduce_window,
    ops.select_and_scatter_add: _select_and_scatter_add,
}
