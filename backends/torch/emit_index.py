"""Emitters of gather and scatter.

Only the dimensions of x in which a window moves are indexed, after being moved to the front; so a row lookup is one
`index`, and the gradient of an embedding one accumulating `index_put`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.backends.torch.carriers import INT64_MAX, ordered, wrap
from plait.backends.torch.constants import number_of
from plait.backends.torch.emit_reduce import highest, lowest
from plait.backends.torch.emit_shape import along, permuted, reshaped
from plait.backends.torch.emitter import Call, Table
from plait.backends.torch.storage import dense
from plait.core_ir.ops import index as ops
from plait.core_ir.types import DType, u64

# The overload itself, not `x[...]`, which asks for a real device even of fake tensors.
aten = torch.ops.aten


@dataclass(frozen=True)
class _Windows:
    """Windows of x, one for each index vector.

    moved: dimensions of x in which the windows do not cover x whole; `starts` has one index tensor of the batch's shape
    for each of them, already clamped. fits: whether the window fitted before clamping, of the batch's shape.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    moved: tuple[int, ...]
    starts: Mapping[int, Tensor]
    fits: Tensor

    @property
    def front(self) -> tuple[int, ...]:
        """Dimensions of x, the moved ones first."""
        return (*self.moved, *(d for d in range(len(self.shape)) if d not in self.moved))

    def indices(self) -> tuple[Tensor, ...]:
        """For each moved dimension its index of each window element: `[*batch, *sizes of the moved]`."""
        num, rank = len(self.batch), len(self.batch) + len(self.moved)
        indices = []
        for order, dim in enumerate(self.moved):
            start = self.starts[dim]
            line = torch.arange(self.sizes[dim], device=start.device)
            start = start.reshape(*start.shape, *(1,) * len(self.moved))
            indices.append(start + line.reshape(along(num + order, rank)))
        return tuple(indices)

    def fits_elements(self) -> Tensor:
        """`fits` for each element of `[*batch, *sizes]`, to be broadcast."""
        return self.fits.reshape(*self.batch, *(1,) * len(self.shape))


def _windows(
    shape: Sequence[int],
    sizes: Sequence[int],
    indices: Tensor,
    dtype: DType,
    names: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
) -> _Windows:
    batch = tuple(indices.shape[:-1])
    places = indices.to(torch.int64)
    if dtype == u64:
        places = torch.where(places < 0, INT64_MAX, places)
    fits = torch.ones(batch, dtype=torch.bool, device=indices.device)
    starts = {}
    for component, dim in enumerate(names):
        start, last = places.select(-1, component), shape[dim] - sizes[dim]
        fits = fits & (start >= 0) & (start <= last)
        starts[dim] = torch.clamp(start, 0, last)
    for dim, number in zip(*batching, strict=True):
        line = torch.arange(shape[dim], device=indices.device)
        starts[dim] = line.reshape(along(number, len(batch)))
    moved = tuple(
        d for d in range(len(shape)) if sizes[d] < shape[d] or (d in batching[0] and shape[d] > 0)
    )
    zero = torch.zeros((1,) * len(batch), dtype=torch.int64, device=indices.device)
    starts = {d: starts.get(d, zero) for d in moved}
    return _Windows(tuple(shape), tuple(sizes), batch, moved, starts, fits)


def _gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    attrs, sizes = call.attrs, call.attrs["slice_sizes"]
    if call.result.size == 0:
        return x.new_zeros(call.result.shape)
    batching = attrs["operand_batching_dims"], attrs["start_indices_batching_dims"]
    windows = _windows(
        x.shape, sizes, indices, call.type(1).dtype, attrs["start_index_map"], batching
    )
    num, rank = len(windows.batch), x.dim()
    front = windows.front
    if windows.moved:
        taken = aten.index.Tensor(permuted(x, front), windows.indices())
    else:
        taken = x.expand(*windows.batch, *x.shape)
    # [*batch, *sizes], its window dimensions in the order of `front`, put back into that of x.
    taken = taken.expand(*windows.batch, *(sizes[d] for d in front))
    taken = permuted(taken, (*range(num), *(num + front.index(d) for d in range(rank))))
    if attrs["mode"] == "fill":
        fill = torch.full((), number_of(attrs["fill_value"]), dtype=x.dtype, device=x.device)
        taken = torch.where(windows.fits_elements(), taken, fill)
    dropped = {*attrs["collapsed_slice_dims"], *attrs["operand_batching_dims"]}
    kept = [sizes[d] for d in range(rank) if d not in dropped]
    taken = reshaped(taken, (*windows.batch, *kept))
    return torch.movedim(taken, tuple(range(num, num + len(kept))), attrs["offset_dims"])


def _neutral(kind: str, dtype: DType) -> Any:
    """What an update that is dropped becomes."""
    if kind in ("min", "max"):
        return highest(dtype) if kind == "min" else lowest(dtype)
    return 1 if kind == "mul" else 0


def _scatter(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    attrs, kind = call.attrs, call.attrs["kind"]
    if x.numel() == 0 or updates.numel() == 0:
        return x
    window_dims = attrs["update_window_dims"]
    num = indices.dim() - 1
    updates = torch.movedim(updates, window_dims, tuple(range(num, num + len(window_dims))))
    dropped = {*attrs["inserted_window_dims"], *attrs["operand_batching_dims"]}
    kept = iter(updates.shape[num:])
    sizes = [1 if d in dropped else next(kept) for d in range(x.dim())]
    batching = attrs["operand_batching_dims"], attrs["scatter_indices_batching_dims"]
    names = attrs["scatter_dims_to_operand_dims"]
    windows = _windows(x.shape, sizes, indices, call.type(1).dtype, names, batching)
    updates = updates.reshape(*windows.batch, *sizes)
    drop = attrs["mode"] == "drop"
    if kind == "add":
        return wrap(_scatter_add(x, updates, windows, drop), call.dtype)
    if kind == "set":
        return _scatter_set(x, updates, windows, drop)
    x, updates = (ordered(y, call.dtype) if kind != "mul" else y for y in (x, updates))
    if drop:
        neutral = torch.full((), _neutral(kind, call.dtype), dtype=x.dtype, device=x.device)
        updates = torch.where(windows.fits_elements(), updates, neutral)
    reduce = {"mul": "prod", "min": "amin", "max": "amax"}[kind]
    places = _positions(windows).reshape(-1)
    out = (
        dense(x).reshape(-1).scatter_reduce(0, places, updates.reshape(-1), reduce).reshape(x.shape)
    )
    if kind == "mul":
        return wrap(out, call.dtype)
    return out != 0 if call.dtype.kind == "bool" else ordered(out, call.dtype)


def _scatter_add(x: Tensor, updates: Tensor, windows: _Windows, drop: bool) -> Tensor:
    if drop:
        updates = torch.where(windows.fits_elements(), updates, 0)
    num, front = len(windows.batch), windows.front
    if not windows.moved:
        return x + (updates.sum(tuple(range(num)), dtype=x.dtype) if num else updates)
    updates = permuted(updates, (*range(num), *(num + d for d in front)))
    out = permuted(dense(x), front).index_put(windows.indices(), updates, accumulate=True)
    return permuted(out, np.argsort(front).tolist())


def _positions(windows: _Windows) -> Tensor:
    """Where each element of `[*batch, *sizes]` goes in row-major x."""
    num, rank = len(windows.batch), len(windows.shape)
    places: Tensor = torch.zeros((1,) * (num + rank), dtype=torch.int64, device=windows.fits.device)
    for dim, size in enumerate(windows.shape):
        line = torch.arange(windows.sizes[dim], device=places.device)
        places = places * size + line.reshape(along(num + dim, num + rank))
        if dim in windows.starts:
            start = windows.starts[dim]
            places = places + start.reshape(*start.shape, *(1,) * rank)
    return places.expand(*windows.batch, *windows.sizes)


def _scatter_set(x: Tensor, updates: Tensor, windows: _Windows, drop: bool) -> Tensor:
    """The last update of each element wins: it is the one of the highest number."""
    if math.prod(windows.batch) == 1 and windows.moved:
        return _set_one(x, updates, windows, drop)
    places = _positions(windows)
    if drop:  # to an element of its own
        places = torch.where(windows.fits_elements(), places, x.numel())
    places, values = places.reshape(-1), updates.reshape(-1)
    numbers = torch.arange(values.numel(), device=x.device)
    none = torch.full((x.numel() + 1,), -1, dtype=torch.int64, device=x.device)
    last = none.scatter_reduce(0, places, numbers, "amax").narrow(0, 0, x.numel())
    written = torch.index_select(values, 0, torch.clamp(last, min=0))
    return torch.where(last >= 0, written, x.reshape(-1)).reshape(x.shape)


def _set_one(x: Tensor, updates: Tensor, windows: _Windows, drop: bool) -> Tensor:
    """A single window: no element is written twice."""
    num, front, indices = len(windows.batch), windows.front, windows.indices()
    updates = permuted(updates, (*range(num), *(num + d for d in front)))
    x = permuted(dense(x), front)
    if drop:
        fits = windows.fits_elements().reshape((1,) * updates.dim())
        updates = torch.where(fits, updates, aten.index.Tensor(x, indices))
    return permuted(x.index_put(indices, updates), np.argsort(front).tolist())


EMITTERS: Table = {ops.gather: _gather, ops.scatter: _scatter}
