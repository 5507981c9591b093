"""Emitters of reductions, cumulative ops and sorts. Sums and products of narrow floats are made in f32."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.backends.torch.carriers import (
    INT64_MAX,
    INT64_MIN,
    carrier,
    is_narrow,
    ordered,
    widen,
    wrap,
)
from plait.backends.torch.emitter import Call, Emitter, Table, computes_wide
from plait.core_ir.ops import reduce as ops
from plait.core_ir.types import DType, u64


def lowest(dtype: DType) -> Any:
    """The identity of max among `ordered` tensors."""
    return _bound(dtype, -1)


def highest(dtype: DType) -> Any:
    """The identity of min among `ordered` tensors."""
    return _bound(dtype, 1)


def _bound(dtype: DType, direction: int) -> Any:
    if dtype == u64:
        return INT64_MIN if direction < 0 else INT64_MAX
    bound = ops.lowest(dtype) if direction < 0 else ops.highest(dtype)
    return int(bound) if dtype.kind != "float" else float(bound)


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    return torch.sum(x, dim=list(dims), dtype=x.dtype) if dims else x


def _prod(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = torch.prod(x, dim=dim, dtype=x.dtype)
    return x


def _extreme(reduce: Callable[..., Tensor], identity: Callable[[DType], Any]) -> Emitter:
    def emit(call: Call, x: Tensor) -> Tensor:
        dims, dtype = call.attrs["dims"], call.dtype
        if not dims:
            return x
        x = ordered(x, dtype)
        if any(x.shape[d] == 0 for d in dims):
            out = torch.full(call.result.shape, identity(dtype), dtype=x.dtype, device=x.device)
        else:
            out = reduce(x, dim=dims)
        return ordered(out, dtype)

    return emit


def _bits(call: Call, x: Tensor) -> Tensor:
    """Bitwise `and` or `or` over dims: torch reduces bool only, so integers are halved until one is left."""
    dims: Sequence[int] = call.attrs["dims"]
    conjunction = call.eqn.op is ops.reduce_and
    if call.dtype.kind == "bool":
        for dim in sorted(dims, reverse=True):
            x = torch.all(x, dim=dim) if conjunction else torch.any(x, dim=dim)
        return x
    combine = torch.bitwise_and if conjunction else torch.bitwise_or
    identity = wrap(torch.full((), -1 if conjunction else 0, device=x.device), call.dtype)
    for dim in sorted(dims, reverse=True):
        x = torch.cat(
            [x, identity.expand([1 if d == dim else n for d, n in enumerate(x.shape)])], dim
        )
        while x.shape[dim] > 1:
            half = x.shape[dim] // 2
            rest = x.narrow(dim, 2 * half, x.shape[dim] - 2 * half)
            paired = combine(x.narrow(dim, 0, half), x.narrow(dim, half, half))
            x = torch.cat([paired, rest], dim)
        x = x.squeeze(dim)
    return x


def _arg(reduce: Callable[..., Tensor]) -> Emitter:
    def emit(call: Call, x: Tensor) -> Tensor:
        if call.result.size == 0:
            dtype = carrier(call.attrs["dtype"])
            return torch.zeros(call.result.shape, dtype=dtype, device=x.device)
        return wrap(reduce(ordered(x, call.dtype), dim=call.attrs["dim"]), call.attrs["dtype"])

    return emit


def _cumulative(scan: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def apply(x: Tensor, dim: int, reverse: bool) -> Tensor:
        return torch.flip(scan(torch.flip(x, (dim,)), dim), (dim,)) if reverse else scan(x, dim)

    return apply


def _ordered_scan(scan: Callable[[Tensor, int], Tensor]) -> Emitter:
    apply = _cumulative(scan)

    def emit(call: Call, x: Tensor) -> Tensor:
        return ordered(apply(ordered(x, call.dtype), **call.attrs), call.dtype)

    return emit


def _sort(call: Call, *xs: Tensor) -> Sequence[Tensor]:
    dim, num_keys = call.attrs["dim"], call.attrs["num_keys"]
    keys = [ordered(x, call.type(i).dtype) for i, x in enumerate(xs[:num_keys])]
    order: Tensor | None = None
    for key in reversed(keys):  # each stable sort keeps the order of the keys that count less
        key = key if order is None else torch.gather(key, dim, order)
        places = torch.sort(key, dim=dim, stable=True).indices
        order = places if order is None else torch.gather(order, dim, places)
    assert order is not None
    return tuple(torch.gather(x, dim, order) for x in xs)


def _top_k(call: Call, x: Tensor) -> Sequence[Tensor]:
    order = torch.sort(ordered(x, call.dtype), dim=-1, descending=True, stable=True).indices
    order = order.narrow(-1, 0, call.attrs["k"])
    return torch.gather(x, -1, order), order.to(torch.int32)


def sum_of(x: Tensor, dim: int, dtype: DType) -> Tensor:
    """The sum over one dimension, narrow floats in f32 and rounded once."""
    return wrap(
        torch.sum(widen(x, dtype), dim=dim, dtype=None if is_narrow(dtype) else x.dtype), dtype
    )


EMITTERS: Table = {
    ops.reduce_sum: computes_wide(_sum),
    ops.reduce_prod: computes_wide(_prod),
    ops.reduce_max: _extreme(torch.amax, lowest),
    ops.reduce_min: _extreme(torch.amin, highest),
    ops.reduce_and: _bits,
    ops.reduce_or: _bits,
    ops.argmax: _arg(torch.argmax),
    ops.argmin: _arg(torch.argmin),
    ops.cumsum: computes_wide(_cumulative(lambda x, dim: torch.cumsum(x, dim, dtype=x.dtype))),
    ops.cumprod: computes_wide(_cumulative(lambda x, dim: torch.cumprod(x, dim, dtype=x.dtype))),
    ops.cummax: _ordered_scan(lambda x, dim: torch.cummax(x, dim).values),
    ops.cummin: _ordered_scan(lambda x, dim: torch.cummin(x, dim).values),
    ops.cumlogsumexp: computes_wide(_cumulative(torch.logcumsumexp)),
    ops.sort: _sort,
    ops.top_k: _top_k,
}
