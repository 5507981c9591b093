"""Emitters of the ops that move data. Views where torch has them; the ports make contiguous what leaves the graph."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.backends.torch.carriers import carrier, wrap
from plait.backends.torch.constants import is_uniform, number_of
from plait.backends.torch.emitter import Call, Table, moves
from plait.backends.torch.storage import dense
from plait.core_ir.op import Literal
from plait.core_ir.ops import shape as ops
from plait.core_ir.types import DType


def _constant(call: Call) -> Tensor:
    literal: Literal = call.attrs["value"]
    if not is_uniform(literal):
        return call.scope.constants[literal.digest]
    dtype = carrier(literal.type.dtype)
    return torch.full(literal.type.shape, number_of(literal), dtype=dtype, device=call.device)


def _iota(call: Call) -> Tensor:
    shape, dim = call.attrs["shape"], call.attrs["dim"]
    dtype = call.attrs["dtype"]
    if (
        dtype.kind == "float" and dtype.itemsize == 1
    ):  # Inductor has no index of an 8-bit float type
        line = torch.cumsum(torch.ones(shape[dim], device=call.device), 0) - 1
    else:
        line = torch.arange(shape[dim], device=call.device)
    line = wrap(line, dtype)
    return line.reshape(along(dim, len(shape))).expand(shape)


def along(dim: int, rank: int) -> tuple[int, ...]:
    """The shape that puts a vector along `dim` of `rank` dimensions."""
    return tuple(-1 if d == dim else 1 for d in range(rank))


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x in another shape; x itself, untraced, when it has it."""
    return x if tuple(x.shape) == tuple(shape) else x.reshape(tuple(shape))


def permuted(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x with its dimensions in another order; x itself, untraced, when they stand so."""
    return x if tuple(dims) == tuple(range(len(dims))) else x.permute(tuple(dims))


def _broadcast(x: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    sizes = [1] * len(shape)
    for size, dim in zip(x.shape, dims, strict=True):
        sizes[dim] = size
    return reshaped(x, sizes).expand(tuple(shape))


def _slice(x: Tensor, start: Sequence[int], limit: Sequence[int], strides: Sequence[int]) -> Tensor:
    for dim, (a, b, step) in enumerate(zip(start, limit, strides, strict=True)):
        if (a, b, step) != (0, x.shape[dim], 1):
            x = torch.ops.aten.slice.Tensor(x, dim, a, b, step)
    return x


def pad_with(
    x: Tensor, number: Any, low: Sequence[int], high: Sequence[int], interior: Sequence[int]
) -> Tensor:
    """x with a number put around it and between its elements; negative low and high crop."""
    for dim, gap in enumerate(interior):
        if gap and x.shape[dim] > 1:
            spread = _constant_pad(x.unsqueeze(dim + 1), number, dim + 1, 0, gap)
            x = spread.flatten(dim, dim + 1).narrow(dim, 0, (x.shape[dim] - 1) * (gap + 1) + 1)
    if any(low) or any(high):
        pairs = [n for pair in zip(reversed(low), reversed(high), strict=True) for n in pair]
        x = torch.ops.aten.constant_pad_nd(x, pairs, number)
    return x


def _constant_pad(x: Tensor, number: Any, dim: int, low: int, high: int) -> Tensor:
    pairs = [0, 0] * (x.dim() - 1 - dim) + [low, high]
    padded: Tensor = torch.ops.aten.constant_pad_nd(x, pairs, number)
    return padded


def _pad(call: Call, x: Tensor, value: Tensor) -> Tensor:
    low, high, interior = (call.attrs[name] for name in ("low", "high", "interior"))
    literal = call.literal(1)
    if literal is not None:
        return pad_with(x, number_of(literal), low, high, interior)
    inside = pad_with(torch.ones_like(x, dtype=torch.bool), False, low, high, interior)
    return torch.where(inside, pad_with(x, zero(call.dtype), low, high, interior), value)


def zero(dtype: DType) -> Any:
    """The number 0 for tensors of that element type."""
    return False if dtype.kind == "bool" else 0


def _concatenate(*xs: Tensor, dim: int) -> Tensor:
    return torch.cat(xs, dim)


def _start(start: Tensor, size: int, window: int) -> Tensor:
    """Where a window of some size starts so that it fits."""
    return torch.clamp(start.to(torch.int64), 0, size - window)


def _dynamic_slice(x: Tensor, *starts: Tensor, sizes: Sequence[int]) -> Tensor:
    for dim, (start, window) in enumerate(zip(starts, sizes, strict=True)):
        if window < x.shape[dim]:
            places = torch.arange(window, device=x.device) + _start(start, x.shape[dim], window)
            x = torch.index_select(x, dim, places)
    return x


def _dynamic_update_slice(x: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    rank = x.dim()
    moved = [d for d in range(rank) if update.shape[d] < x.shape[d]]
    if not moved:
        return update
    places = []
    for order, dim in enumerate(moved):
        window = update.shape[dim]
        line = torch.arange(window, device=x.device) + _start(starts[dim], x.shape[dim], window)
        places.append(line.reshape(along(order, len(moved))))
    front = [*moved, *(d for d in range(rank) if d not in moved)]
    back: list[int] = np.argsort(front).tolist()
    return permuted(
        permuted(dense(x), front).index_put(tuple(places), permuted(update, front)), back
    )


EMITTERS: Table = {
    ops.constant: _constant,
    ops.iota: _iota,
    ops.reshape: moves(reshaped),
    ops.transpose: moves(lambda x, permutation: permuted(x, permutation)),
    ops.broadcast: moves(_broadcast),
    ops.slice_: moves(_slice),
    ops.pad: _pad,
    ops.concatenate: moves(_concatenate),
    ops.reverse: moves(lambda x, dims: torch.flip(x, dims) if dims else x),
    ops.dynamic_slice: moves(_dynamic_slice),
    ops.dynamic_update_slice: moves(_dynamic_update_slice),
}
