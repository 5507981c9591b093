"""Lowering of reductions, cumulative ops, sorting and softmax."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import TensorType, bool_, i64
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


@in_compute_dtype
def logsumexp(s: Site, x: Value, dims: Dims, keepdim: bool = False) -> Value:
    x = s.b.convert(x, s.type.dtype)
    axes = dims_of(dims, x.type.rank)
    if not x.type.size:
        return s(ew.log, total(s, s(ew.exp, x), axes, keepdim))
    top = total(s, x, axes, op=rd.reduce_max)
    top = s.select(s(ew.is_finite, top), top, 0, top.type)
    sums = total(s, s(ew.exp, s(ew.sub, x, spread(s, top, x.type.shape, axes))), axes)
    result = s(ew.add, s(ew.log, sums), top)
    return s.b.reshape(result, keeping(x.type.shape, axes)) if keepdim else result


def _shifted(s: Site, x: Value, axes: Sequence[int]) -> Value:
    return s(ew.sub, x, spread(s, total(s, x, axes, op=rd.reduce_max), x.type.shape, axes))


def softmax(s: Site, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """exp(x - max) / sum, in f32 for 16-bit floats."""
    x = s.b.convert(x, compute_dtype(s.type.dtype))
    axes = dims_of(dim, x.type.rank)
    exps = s(ew.exp, _shifted(s, x, axes)) if x.type.size else x
    result = s(ew.div, exps, spread(s, total(s, exps, axes), x.type.shape, axes))
    return s.b.convert(result, s.type.dtype)


def log_softmax(s: Site, x: Value, dim: int, half_to_float: bool = False) -> Value:
    """x - max - log(sum(exp(x - max)))."""
    x = s.b.convert(x, compute_dtype(s.type.dtype))
    axes = dims_of(dim, x.type.rank)
    if not x.type.size:
        return s.b.convert(x, s.type.dtype)
    rest = _shifted(s, x, axes)
    log = s(ew.log, total(s, s(ew.exp, rest), axes))
    return s.b.convert(s(ew.sub, rest, spread(s, log, x.type.shape, axes)), s.type.dtype)


def softmax_backward(s: Site, grad: Value, out: Value, dim: int, input_dtype: Any) -> Value:
    """out * (grad - sum(grad * out))."""
    wide = compute_dtype(out.type.dtype)
    grad, out = s.b.convert(grad, wide), s.b.convert(out, wide)
    axes = dims_of(dim, out.type.rank)
    product = s(ew.mul, grad, out)
    sums = spread(s, total(s, product, axes), out.type.shape, axes)
    return s.b.convert(s(ew.sub, product, s(ew.mul, out, sums)), s.type.dtype)


def log_softmax_backward(s: Site, grad: Value, out: Value, dim: int, input_dtype: Any) -> Value:
    """grad - exp(out) * sum(grad)."""
    wide = compute_dtype(out.type.dtype)
    grad, out = s.b.convert(grad, wide), s.b.convert(out, wide)
    axes = dims_of(dim, out.type.rank)
    sums = spread(s, total(s, grad, axes), out.type.shape, axes)
    result = s(ew.sub, grad, s(ew.mul, s(ew.exp, out), sums))
    return s.b.convert(result, s.type.dtype)


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
    aten.cumsum.default: _cumulative(rd.cumsum),
    aten.cumprod.default: _cumulative(rd.cumprod),
    aten.logcumsumexp.default: _cumulative(rd.cumlogsumexp),
    aten.sort.default: sort,
    aten.sort.stable: sort_stable,
    aten.topk.default: topk,
    aten.logsumexp.default: logsumexp,
    aten._softmax.default: softmax,
    aten._safe_softmax.default: lambda s, x, dim, dtype=None: _safe_softmax(s, x, dim),
    aten._log_softmax.default: log_softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.linalg_vector_norm.default: vector_norm,
}


def _safe_softmax(s: Site, x: Value, dim: int) -> Value:
    """Softmax, but 0 where a whole row is -inf."""
    axes = dims_of(dim, x.type.rank)
    masked = total(s, s.compare("eq", x, -math.inf), axes, op=rd.reduce_and)
    masked = spread(s, masked, x.type.shape, axes)
    return s.select(masked, 0, softmax(s, s.b.convert(x, s.type.dtype), dim), s.type)
