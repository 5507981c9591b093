"""Lowering of ops that move, cut and join tensors; a view is a copy here, since types have no strides."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import TensorType
from plait.frontends.torch.rules import Number, Rules, Site, dim_of

aten = torch.ops.aten


def reshape(s: Site, x: Value, *_: Any, **__: Any) -> Value:
    return s.b.reshape(x, s.type.shape)


def transpose_matrix(s: Site, x: Value) -> Value:
    return s.b.transpose(x, range(x.type.rank)[::-1])


def transpose(s: Site, x: Value, dim0: int, dim1: int) -> Value:
    order = list(range(x.type.rank))
    if order:
        a, b = dim_of(dim0, len(order)), dim_of(dim1, len(order))
        order[a], order[b] = order[b], order[a]
    return s.b.transpose(x, order)


def permute(s: Site, x: Value, dims: Sequence[int]) -> Value:
    return s.b.transpose(x, [dim_of(d, x.type.rank) for d in dims])


def expand(s: Site, x: Value, *_: Any, **__: Any) -> Value:
    return s.b.expand(x, s.type.shape)


def sliced(
    s: Site, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim = dim_of(dim, x.type.rank)
    low, high = _bounds(x.type.shape[dim], start, end)
    return _take(s, x, dim, low, max(low, high), step)


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def _take(s: Site, x: Value, dim: int, low: int, high: int, step: int = 1) -> Value:
    shape = x.type.shape
    if (low, high, step) == (0, shape[dim], 1):
        return x
    start, limit, strides = [0] * len(shape), list(shape), [1] * len(shape)
    start[dim], limit[dim], strides[dim] = low, high, step
    return s(sh.slice_, x, start=tuple(start), limit=tuple(limit), strides=tuple(strides))


def select(s: Site, x: Value, dim: int, index: int) -> Value:
    dim = dim_of(dim, x.type.rank)
    index %= x.type.shape[dim]
    return s.b.reshape(_take(s, x, dim, index, index + 1), s.type.shape)


def _spread(s: Site, grad: Value, type: TensorType, dim: int, low: int, step: int = 1) -> Value:
    """Zeros of `type`, but grad at every step-th place of `dim` from `low`: the gradient of a slice."""
    rank, size, count = type.rank, type.shape[dim], grad.type.shape[dim]
    if count == 0:
        return s.b.full(type, 0)
    lows, highs, interior = [0] * rank, [0] * rank, [0] * rank
    lows[dim], interior[dim] = low, step - 1
    highs[dim] = size - low - (1 + (count - 1) * step)
    zero = s.b.literal(0, type.dtype)
    return s(sh.pad, grad, zero, low=tuple(lows), high=tuple(highs), interior=tuple(interior))


def slice_backward(
    s: Site, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Value:
    dim = dim_of(dim, len(sizes))
    low, high = _bounds(sizes[dim], start, end)
    if (low, high, step) == (0, sizes[dim], 1):
        return grad
    return _spread(s, grad, s.type, dim, low, step)


def select_backward(s: Site, grad: Value, sizes: Sequence[int], dim: int, index: int) -> Value:
    dim = dim_of(dim, len(sizes))
    shape = [*grad.type.shape[:dim], 1, *grad.type.shape[dim:]]
    return _spread(s, s.b.reshape(grad, shape), s.type, dim, index % sizes[dim])


def slice_scatter(
    s: Site,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    dim = dim_of(dim, x.type.rank)
    low, high = _bounds(x.type.shape[dim], start, end)
    return _overlay(s, x, s.b.convert(src, x.type.dtype), dim, low, high, step)


def select_scatter(s: Site, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = dim_of(dim, x.type.rank)
    index %= x.type.shape[dim]
    shape = [*x.type.shape[:dim], 1, *x.type.shape[dim + 1 :]]
    src = s.b.convert(
        s.b.reshape(s.b.expand(src, _without(x.type.shape, dim)), shape), x.type.dtype
    )
    return _overlay(s, x, src, dim, index, index + 1, 1)


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _overlay(s: Site, x: Value, src: Value, dim: int, low: int, high: int, step: int) -> Value:
    """x with src at every step-th place of `dim` in [low, high)."""
    size = x.type.shape[dim]
    if low >= high:
        return x
    if step == 1:
        parts = (_take(s, x, dim, 0, low), src, _take(s, x, dim, high, size))
        return join(s, [p for p in parts if p.type.shape[dim]], dim)
    places = np.zeros(size, np.bool_)
    places[low:high:step] = True
    mask = s.b.expand(s.b.literal(places), x.type.shape, (dim,))
    return s(ew.select, mask, _spread(s, src, x.type, dim, low, step), x)


def join(s: Site, xs: Sequence[Value], dim: int) -> Value:
    """Concatenate; one alone is itself."""
    return xs[0] if len(xs) == 1 else s(sh.concatenate, *xs, dim=dim)


def cat(s: Site, xs: Sequence[Value], dim: int = 0) -> Value:
    # torch lets an empty tensor of rank 1 stand for nothing
    kept = [x for x in xs if x.type.shape != (0,)] or list(xs[:1])
    return join(s, [s.b.convert(x, s.type.dtype) for x in kept], dim_of(dim, s.type.rank))


def stack(s: Site, xs: Sequence[Value], dim: int = 0) -> Value:
    dim = dim_of(dim, s.type.rank)
    shape = (*s.type.shape[:dim], 1, *s.type.shape[dim + 1 :])
    return join(s, [s.b.reshape(s.b.convert(x, s.type.dtype), shape) for x in xs], dim)


def split_sizes(s: Site, x: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    dim = dim_of(dim, x.type.rank)
    ends = np.cumsum(sizes).tolist()
    return [_take(s, x, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def split(s: Site, x: Value, size: int, dim: int = 0) -> list[Value]:
    total = x.type.shape[dim_of(dim, x.type.rank)]
    sizes = [min(size, total - at) for at in range(0, total, size)] if size else [0]
    return split_sizes(s, x, sizes or [0], dim)


def unbind(s: Site, x: Value, dim: int = 0) -> list[Value]:
    dim = dim_of(dim, x.type.rank)
    shape = _without(x.type.shape, dim)
    return [s.b.reshape(_take(s, x, dim, i, i + 1), shape) for i in range(x.type.shape[dim])]


def pad(s: Site, x: Value, padding: Sequence[int], value: Number = 0) -> Value:
    """torch lists pairs from the last dim on."""
    rank = x.type.rank
    low, high = [0] * rank, [0] * rank
    for i in range(len(padding) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = padding[2 * i], padding[2 * i + 1]
    number = s.b.literal(value, x.type.dtype)
    return s(sh.pad, x, number, low=tuple(low), high=tuple(high), interior=(0,) * rank)


def flip(s: Site, x: Value, dims: Sequence[int]) -> Value:
    chosen = tuple(sorted(dim_of(d, x.type.rank) for d in dims))
    return s(sh.reverse, x, dims=chosen) if chosen and x.type.rank else x


def roll(s: Site, x: Value, shifts: Sequence[int] | int, dims: Sequence[int] | int = ()) -> Value:
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if not dims:
        flat = s.b.reshape(x, (x.type.size,))
        return s.b.reshape(_rolled(s, flat, shifts[0], 0), x.type.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(s, x, shift, dim_of(dim, x.type.rank))
    return x


def _rolled(s: Site, x: Value, shift: int, dim: int) -> Value:
    size = x.type.shape[dim]
    cut = -shift % size if size else 0
    if cut == 0:
        return x
    return join(s, [_take(s, x, dim, cut, size), _take(s, x, dim, 0, cut)], dim)


def repeat(s: Site, x: Value, repeats: Sequence[int]) -> Value:
    """[d] repeated n times is [n, d] broadcast, then flattened."""
    lead = len(repeats) - x.type.rank
    shape = (1,) * lead + x.type.shape
    wide = [size for n, d in zip(repeats, shape, strict=True) for size in (n, d)]
    dims = [2 * (lead + i) + 1 for i in range(x.type.rank)]
    return s.b.reshape(s.b.expand(x, wide, dims), s.type.shape)


def diagonal(s: Site, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """The two dims flattened, then every (n + 1)-th element from the first of the diagonal."""
    a, b = (dim_of(d, x.type.rank) for d in (dim1, dim2))
    rest = [d for d in range(x.type.rank) if d not in (a, b)]
    rows, columns = x.type.shape[a], x.type.shape[b]
    flat = s.b.transpose(x, [*rest, a, b])
    flat = s.b.reshape(flat, [*(x.type.shape[d] for d in rest), rows * columns])
    count = s.type.shape[-1]
    first = offset if offset >= 0 else -offset * columns
    if count == 0:
        return _take(s, flat, len(rest), 0, 0)
    return _take(s, flat, len(rest), first, first + (count - 1) * (columns + 1) + 1, columns + 1)


def diagonal_backward(
    s: Site, grad: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Value:
    rank = len(sizes)
    a, b = dim_of(dim1, rank), dim_of(dim2, rank)
    rest = [d for d in range(rank) if d not in (a, b)]
    rows, columns = sizes[a], sizes[b]
    first = offset if offset >= 0 else -offset * columns
    lead = tuple(sizes[d] for d in rest)
    flat_type = TensorType(grad.type.dtype, (*lead, rows * columns))
    flat = _spread(s, grad, flat_type, len(rest), first, columns + 1)
    order = [*rest, a, b]
    back = [order.index(d) for d in range(rank)]
    return s.b.transpose(s.b.reshape(flat, (*lead, rows, columns)), back)


def copy(s: Site, x: Value, src: Value, non_blocking: bool = False) -> Value:
    return s.like(src, s.type)


def view_as_real(s: Site, x: Value) -> Value:
    shape = (*x.type.shape, 1)
    parts = [s.b.reshape(s(op, x), shape) for op in (ew.real, ew.imag)]
    return join(s, parts, x.type.rank)


def view_as_complex(s: Site, x: Value) -> Value:
    real, imag = unbind(s, x, -1)
    return s(ew.complex_, real, imag)


def unfold(s: Site, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows along a dim as a new last dim: one strided slice for each place in the window."""
    dim = dim_of(dim, x.type.rank)
    if x.type.rank == 0:
        return s.b.reshape(x, s.type.shape)
    count = s.type.shape[dim]
    parts = [
        s.b.reshape(
            _take(s, x, dim, i, i + (count - 1) * step + 1, step), (*_with(x, dim, count), 1)
        )
        for i in range(size)
    ]
    return join(s, parts, x.type.rank)


def _with(x: Value, dim: int, size: int) -> tuple[int, ...]:
    return (*x.type.shape[:dim], size, *x.type.shape[dim + 1 :])


RULES: Rules = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten._reshape_alias.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        reshape,
    ),
    aten.t.default: transpose_matrix,
    aten.transpose.int: transpose,
    aten.permute.default: permute,
    aten.expand.default: expand,
    aten.slice.Tensor: sliced,
    aten.select.int: select,
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_sizes,
    aten.unsafe_split.Tensor: split,
    aten.unbind.int: unbind,
    aten.constant_pad_nd.default: pad,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.repeat.default: repeat,
    aten.diagonal.default: diagonal,
    aten.diagonal_backward.default: diagonal_backward,
    aten.copy.default: copy,
    aten.view_as_real.default: view_as_real,
    aten.view_as_complex.default: view_as_complex,
    aten.unfold.default: unfold,
}
