"""Lowering of cumulative ops, sorting and what is read off a sorted dim."""

from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import TensorType, i64
from plait.frontends.torch.lower_reduce import keeping
from plait.frontends.torch.rules import (
    PlainRule,
    Result,
    Rule,
    Rules,
    Site,
    dim_of,
)

aten = torch.ops.aten


def _cumulative(op: Op) -> PlainRule:
    def rule(s: Site, x: Value, dim: int, *, dtype: Any = None) -> Value:
        x = s.b.convert(x, s.type.dtype)
        return s(op, x, dim=dim_of(dim, x.type.rank), reverse=False) if x.type.rank else x

    return rule


def _sorted(s: Site, x: Value, dim: int, descending: bool) -> list[Value]:
    """Stable both ways: descending is a reversed ascending sort of the reversed input."""
    dim = dim_of(dim, x.type.rank)
    if x.type.rank == 0:
        return [x, s.b.full(TensorType(i64, ()), 0)]
    index = s(sh.iota, dtype=i64, shape=x.type.shape, dim=dim)
    operands = [s(sh.reverse, v, dims=(dim,)) if descending else v for v in (x, index)]
    results = s.b.emit(rd.sort, *operands, dim=dim, num_keys=1)
    return [s(sh.reverse, v, dims=(dim,)) if descending else v for v in results]


def sort(
    s: Site, x: Value, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> Result:
    return _sorted(s, x, dim, descending)


def sort_stable(
    s: Site, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Result:
    return _sorted(s, x, dim, descending)


def topk(
    s: Site, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Result:
    dim = dim_of(dim, x.type.rank)
    if x.type.rank == 0:
        return x, s.b.full(TensorType(i64, ()), 0)
    if not largest:
        parts = _sorted(s, x, dim, descending=False)
        limit = tuple(k if i == dim else d for i, d in enumerate(x.type.shape))
        zeros, strides = (0,) * x.type.rank, (1,) * x.type.rank
        return [s(sh.slice_, v, start=zeros, limit=limit, strides=strides) for v in parts]
    last = [*(d for d in range(x.type.rank) if d != dim), dim]
    values, index = s.b.emit(rd.top_k, s.b.transpose(x, last), k=k)
    back = [last.index(d) for d in range(x.type.rank)]
    return s.b.transpose(values, back), s.b.convert(s.b.transpose(index, back), i64)


def _extreme_so_far(op: Op) -> Rule:
    def rule(s: Site, x: Value, dim: int) -> Result:
        index_type = TensorType(i64, x.type.shape)
        if x.type.rank == 0:
            return x, s.b.full(index_type, 0)
        dim = dim_of(dim, x.type.rank)
        values = s(op, x, dim=dim, reverse=False)
        here = s(ew.compare, x, values, direction="eq")
        if x.type.dtype.kind == "float":
            here = s(ew.or_, here, s.is_nan(x))
        places = s(sh.iota, dtype=i64, shape=x.type.shape, dim=dim)
        last = s(rd.cummax, s.select(here, places, 0, index_type), dim=dim, reverse=False)
        return values, last

    return rule


def _kth(s: Site, x: Value, k: int, dim: int, keepdim: bool) -> list[Value]:
    """The k-th smallest, counted from 0, and where it stands."""
    if x.type.rank == 0:
        return [x, s.b.full(TensorType(i64, ()), 0)]
    dim = dim_of(dim, x.type.rank)
    shape = x.type.shape
    start = tuple(k if d == dim else 0 for d in range(len(shape)))
    limit = tuple(k + 1 if d == dim else n for d, n in enumerate(shape))
    ones = (1,) * len(shape)
    out = keeping(shape, (dim,)) if keepdim else (*shape[:dim], *shape[dim + 1 :])
    return [
        s.b.reshape(s(sh.slice_, v, start=start, limit=limit, strides=ones), out)
        for v in _sorted(s, x, dim, descending=False)
    ]


def kthvalue(s: Site, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> Result:
    return _kth(s, x, k - 1, dim, keepdim)


def median_dim(s: Site, x: Value, dim: int = -1, keepdim: bool = False) -> Result:
    """The lower one of two in the middle; NaN, which sorts last, where there is any."""
    size = x.type.shape[dim_of(dim, x.type.rank)] if x.type.rank else 1
    middle = _kth(s, x, (size - 1) // 2, dim, keepdim)
    if x.type.dtype.kind != "float":
        return middle
    last = _kth(s, x, size - 1, dim, keepdim)
    has_nan = s.is_nan(last[0])
    return [s.select(has_nan, n, m, m.type) for n, m in zip(last, middle, strict=True)]


def median(s: Site, x: Value) -> Any:
    result = median_dim(s, s.b.reshape(x, (x.type.size,)), 0)
    assert isinstance(result, list)
    return result[0]


RULES: Rules = {
    aten.cumsum.default: _cumulative(rd.cumsum),
    aten.cumprod.default: _cumulative(rd.cumprod),
    aten.logcumsumexp.default: _cumulative(rd.cumlogsumexp),
    aten.sort.default: sort,
    aten.sort.stable: sort_stable,
    aten.topk.default: topk,
    aten.cummax.default: _extreme_so_far(rd.cummax),
    aten.cummin.default: _extreme_so_far(rd.cummin),
    aten.kthvalue.default: kthvalue,
    aten.median.dim: median_dim,
    aten.median.default: median,
}
