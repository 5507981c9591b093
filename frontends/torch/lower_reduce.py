"""Lowering of reductions: over given dims, or over all."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.core_ir.types import bool_, i64
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.rules import (
    Number,
    PlainRule,
    Result,
    Rule,
    Rules,
    Site,
    dim_of,
    dims_of,
    in_compute_dtype,
)

aten = torch.ops.aten
Dims = int | Sequence[int] | None


def keeping(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The shape with the reduced dims as 1."""
    return tuple(1 if i in dims else d for i, d in enumerate(shape))


def total(
    s: Site, x: Value, dims: Sequence[int], keepdim: bool = False, op: Op = rd.reduce_sum
) -> Value:
    """Reduce over dims; none leaves x as it is."""
    result = s(op, x, dims=tuple(dims)) if dims else x
    return s.b.reshape(result, keeping(x.type.shape, dims)) if keepdim else result


def spread(s: Site, x: Value, shape: Sequence[int], dims: Sequence[int]) -> Value:
    """The inverse direction: x, whose dims are those of `shape` without `dims`, broadcast to `shape`."""
    return s.b.expand(x, shape, [i for i in range(len(shape)) if i not in dims])


def sum_(
    s: Site, x: Value, dims: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    x = s.b.convert(x, s.type.dtype)
    return total(s, x, dims_of(dims, x.type.rank), keepdim)


def mean(
    s: Site, x: Value, dims: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """The sum divided by the number of elements; 16-bit floats in f32 throughout."""
    wide = compute_dtype(s.type.dtype)
    x = s.b.convert(x, wide)
    axes = dims_of(dims, x.type.rank)
    count = math.prod(x.type.shape[d] for d in axes)
    return s.b.convert(s.div(total(s, x, axes, keepdim), count), s.type.dtype)


def _reduction(op: Op, of_bool: Op | None = None) -> PlainRule:
    def rule(s: Site, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
        chosen = of_bool if x.type.dtype == bool_ and of_bool is not None else op
        return total(s, x, dims_of(dims, x.type.rank), keepdim, chosen)

    return rule


def _truth(op: Op) -> PlainRule:
    def rule(s: Site, x: Value, dims: Dims = None, keepdim: bool = False) -> Value:
        result = total(s, s.b.convert(x, bool_), dims_of(dims, x.type.rank), keepdim, op)
        return s.b.convert(result, s.type.dtype)

    return rule


def prod(s: Site, x: Value, *, dtype: Any = None) -> Value:
    x = s.b.convert(x, s.type.dtype)
    return total(s, x, range(x.type.rank), op=rd.reduce_prod)


def prod_dim(s: Site, x: Value, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Value:
    x = s.b.convert(x, s.type.dtype)
    return total(s, x, dims_of(dim, x.type.rank), keepdim, rd.reduce_prod)


def arg(op: Op) -> PlainRule:
    def rule(s: Site, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if x.type.rank == 0:
            return s.b.full(s.type, 0)
        if dim is None:
            x, dim = s.b.reshape(x, (x.type.size,)), 0
        return s.b.reshape(s(op, x, dim=dim_of(dim, x.type.rank), dtype=i64), s.type.shape)

    return rule


def _extreme_with_index(op: Op, index_op: Op) -> Rule:
    def rule(s: Site, x: Value, dim: int, keepdim: bool = False) -> Result:
        values = _reduction(op, rd.reduce_or if op is rd.reduce_max else rd.reduce_and)(
            s, x, dim, keepdim
        )
        if not s.reads(1):
            return values, None
        assert s.types[1] is not None
        if x.type.rank == 0:
            return values, s.b.full(s.types[1], 0)
        index = s(index_op, x, dim=dim_of(dim, x.type.rank), dtype=i64)
        return values, s.b.reshape(index, s.types[1].shape)

    return rule


def variance(
    s: Site, x: Value, dims: Dims, correction: Number | None, keepdim: bool
) -> tuple[Value, Value]:
    """Two passes: the mean, then the mean square of what is left; both in the compute dtype."""
    x = s.b.convert(x, compute_dtype(x.type.dtype))
    axes = dims_of(dims, x.type.rank)
    count = math.prod(x.type.shape[d] for d in axes)
    centre = s.div(total(s, x, axes), count)
    rest = s(ew.sub, x, spread(s, centre, x.type.shape, axes))
    square = s(ew.abs_, rest) if x.type.dtype.kind == "complex" else rest
    squares = total(s, s(ew.mul, square, square), axes, keepdim)
    free = max(count - float(1 if correction is None else correction.real), 0.0)
    shape = keeping(x.type.shape, axes) if keepdim else centre.type.shape
    return s.div(squares, free), s.b.reshape(centre, shape)


def var(
    s: Site, x: Value, dims: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Value:
    return s.b.convert(variance(s, x, dims, correction, keepdim)[0], s.type.dtype)


def std(
    s: Site, x: Value, dims: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Value:
    return s.b.convert(s(ew.sqrt, variance(s, x, dims, correction, keepdim)[0]), s.type.dtype)


def var_mean(
    s: Site, x: Value, dims: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> Result:
    both = variance(s, x, dims, correction, keepdim)
    return [s.b.convert(v, t.dtype) for v, t in zip(both, s.types, strict=True) if t is not None]


@in_compute_dtype
def vector_norm(
    s: Site,
    x: Value,
    order: Number = 2,
    dims: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Value:
    x = s(ew.abs_, x) if x.type.dtype.kind != "unsigned" else x
    x = s.b.convert(x, s.type.dtype)
    axes = dims_of(dims, x.type.rank)
    if order == math.inf:
        return total(s, x, axes, keepdim, rd.reduce_max)
    if order == -math.inf:
        return total(s, x, axes, keepdim, rd.reduce_min)
    if order == 0:
        return total(s, s.b.convert(s.compare("ne", x, 0), x.type.dtype), axes, keepdim)
    if order == 1:
        return total(s, x, axes, keepdim)
    if order == 2:
        return s(ew.sqrt, total(s, s(ew.mul, x, x), axes, keepdim))
    sums = total(s, s(ew.pow_, x, s.b.full(x.type, order)), axes, keepdim)
    return s(ew.pow_, sums, s.b.full(sums.type, 1 / order))


_amax = _reduction(rd.reduce_max, rd.reduce_or)
_amin = _reduction(rd.reduce_min, rd.reduce_and)

RULES: Rules = {
    aten.sum.default: sum_,
    aten.sum.dim_IntList: sum_,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.max.default: _amax,
    aten.min.default: _amin,
    aten.max.dim: _extreme_with_index(rd.reduce_max, rd.argmax),
    aten.min.dim: _extreme_with_index(rd.reduce_min, rd.argmin),
    aten.argmax.default: arg(rd.argmax),
    aten.argmin.default: arg(rd.argmin),
    aten.any.default: _truth(rd.reduce_or),
    aten.any.dim: _truth(rd.reduce_or),
    aten.any.dims: _truth(rd.reduce_or),
    aten.all.default: _truth(rd.reduce_and),
    aten.all.dim: _truth(rd.reduce_and),
    aten.all.dims: _truth(rd.reduce_and),
    aten.prod.default: prod,
    aten.prod.dim_int: prod_dim,
    aten.var.correction: var,
    aten.std.correction: std,
    aten.var_mean.correction: var_mean,
    aten.linalg_vector_norm.default: vector_norm,
}
