"""Lowering of ops that read or write at computed places: embeddings, indexing, gather and scatter."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import reduce as rd
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import DType, TensorType, bool_, i64
from plait.frontends.torch.access import read, write
from plait.frontends.torch.dtypes import compute_dtype, integer_bounds
from plait.frontends.torch.lower_shape import join
from plait.frontends.torch.rules import Number, Operand, Rules, Site, broadcast_shapes, dim_of

aten = torch.ops.aten


def column(s: Site, index: Value) -> Value:
    """Indices into one dim as index vectors of length 1."""
    return s.b.reshape(index, (*index.type.shape, 1))


def embedding(
    s: Site,
    table: Value,
    ids: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return read(s, table, column(s, ids), (0,), 0)


def embedding_backward(
    s: Site,
    grad: Value,
    ids: Value,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Value:
    rank = ids.type.rank
    lead = tuple(range(rank))
    if scale_grad_by_freq:
        counts = _counts(s, ids, num_weights, grad.type.dtype)
        times = read(s, counts, column(s, ids), (0,), 0)
        grad = s(ew.div, grad, s.b.expand(times, grad.type.shape, lead))
    if padding_idx >= 0:
        padding = s.compare("eq", ids, padding_idx)
        padding = s.b.expand(padding, grad.type.shape, lead)
        grad = s.select(padding, 0, grad, grad.type)
    zeros = s.b.full(TensorType(grad.type.dtype, s.type.shape), 0)
    return write(s, zeros, column(s, ids), grad, (0,), 0, "add")


def _counts(s: Site, ids: Value, num: int, dtype: DType) -> Value:
    zeros = s.b.full(TensorType(dtype, (num,)), 0)
    ones = s.b.full(TensorType(dtype, ids.type.shape), 1)
    return write(s, zeros, column(s, ids), ones, (0,), 0, "add")


def index_select(s: Site, x: Value, dim: int, index: Value) -> Value:
    if x.type.rank == 0:
        return s.b.reshape(x, s.type.shape)
    index = s.b.reshape(index, (index.type.size,))
    dim = dim_of(dim, x.type.rank)
    return read(s, x, column(s, index), (dim,), dim)


def _vectors(s: Site, x: Value, indices: Sequence[Value | None]) -> tuple[Value, list[int], int]:
    """Advanced indexing as index vectors: the vectors, the dims they index, where their dims go in the result."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    shape = broadcast_shapes(*(v.type.shape for v in given))
    wrapped = [_wrapped(s, v, x.type.shape[d]) for v, d in zip(given, dims, strict=True)]
    columns = [column(s, s.b.expand(v, shape)) for v in wrapped]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return join(s, columns, len(shape)), dims, dims[0] if adjacent else 0


def _wrapped(s: Site, index: Value, size: int) -> Value:
    """Negative indices count from the end."""
    index = s.b.convert(index, i64)
    return s.select(s.compare("lt", index, 0), s.add(index, size), index, index.type)


def index(s: Site, x: Value, indices: Sequence[Value | None]) -> Value:
    vectors, dims, at = _vectors(s, x, indices)
    return read(s, x, vectors, dims, at)


def index_put(
    s: Site,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    *_: Any,
) -> Value:
    first = indices[0]
    if (
        first is not None
        and first.type.dtype == bool_
        and len(indices) == 1
        and values.type.size == 1
    ):
        mask = s.b.expand(first, x.type.shape, range(first.type.rank))
        value = s.b.reshape(values, ())
        return s.select(mask, s.add(x, value) if accumulate else value, x, x.type)
    vectors, dims, at = _vectors(s, x, indices)
    rest = [n for d, n in enumerate(x.type.shape) if d not in dims]
    shape = (*rest[:at], *vectors.type.shape[:-1], *rest[at:])
    updates = s.b.expand(s.b.convert(values, x.type.dtype), shape)
    return write(s, x, vectors, updates, dims, at, "add" if accumulate else "set")


def _coordinates(s: Site, index: Value, dim: int) -> Value:
    """For each element of `index` its own place, but `index` along `dim`."""
    shape = index.type.shape
    index = s.b.convert(index, i64)
    places = [
        index if d == dim else s(sh.iota, dtype=i64, shape=shape, dim=d) for d in range(len(shape))
    ]
    return join(s, [column(s, place) for place in places], len(shape))


def gather(s: Site, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if x.type.rank == 0:
        return s.b.reshape(x, s.type.shape)
    if index.type.rank == 0:
        index = s.b.reshape(index, (1,))
    dim = dim_of(dim, x.type.rank)
    picked = read(s, x, _coordinates(s, index, dim), range(x.type.rank), 0)
    return s.b.reshape(picked, s.type.shape)


def _scatter(s: Site, x: Value, dim: int, index: Value, src: Operand, kind: str) -> Value:
    shape = x.type.shape
    if x.type.rank == 0:
        x, index = s.b.reshape(x, (1,)), s.b.reshape(index, (1,))
        src = s.b.reshape(src, (1,)) if isinstance(src, Value) else src
    dim = dim_of(dim, x.type.rank)
    type = TensorType(x.type.dtype, index.type.shape)
    if isinstance(src, Value) and src.type.shape != index.type.shape:
        zeros, ones = (0,) * src.type.rank, (1,) * src.type.rank
        src = s(sh.slice_, src, start=zeros, limit=index.type.shape, strides=ones)
    coordinates = _coordinates(s, index, dim)
    result = write(s, x, coordinates, s.like(src, type), range(x.type.rank), 0, kind)
    return s.b.reshape(result, shape)


def scatter(s: Site, x: Value, dim: int, index: Value, src: Operand) -> Value:
    return _scatter(s, x, dim, index, src, "set")


def scatter_with(s: Site, x: Value, dim: int, index: Value, src: Operand, *, reduce: str) -> Value:
    return _scatter(s, x, dim, index, src, {"add": "add", "multiply": "mul"}[reduce])


def scatter_add(s: Site, x: Value, dim: int, index: Value, src: Value) -> Value:
    return _scatter(s, x, dim, index, src, "add")


_KINDS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


def scatter_reduce(
    s: Site, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    """What x holds at a place counts as one more number, unless `include_self` is off."""
    start = (
        x if include_self else _scatter(s, x, dim, index, _identity(reduce, x.type.dtype), "set")
    )
    result = _scatter(s, start, dim, index, src, _KINDS[reduce])
    if reduce != "mean":
        return result
    zero = s.b.full(x.type.with_dtype(i64), 0)
    counts = _scatter(s, zero, dim, index, 1, "add")
    counts = s.add(counts, 1) if include_self else s(ew.max_, counts, s.b.full(counts.type, 1))
    if x.type.dtype.is_integer:
        return s(ew.int_div, result, s.b.convert(counts, x.type.dtype), rounding="floor")
    return s(ew.div, result, s.b.convert(counts, x.type.dtype))


def _identity(reduce: str, dtype: DType) -> Number:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_inexact:
        return -math.inf if reduce == "amax" else math.inf
    low, high = integer_bounds(dtype)
    return low if reduce == "amax" else high


def index_add(
    s: Site, x: Value, dim: int, index: Value, source: Value, *, alpha: Number = 1
) -> Value:
    if alpha != 1:
        source = s.mul(source, alpha)
    return _along_dim(s, x, dim, index, source, "add")


def index_copy(s: Site, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _along_dim(s, x, dim, index, source, "set")


def index_fill(s: Site, x: Value, dim: int, index: Value, value: Operand) -> Value:
    at = dim_of(dim, x.type.rank)
    shape = list(x.type.shape)
    if shape:
        shape[at] = index.type.size
    return _along_dim(s, x, dim, index, s.like(value, x.type.with_shape(shape)), "set")


def _along_dim(s: Site, x: Value, dim: int, index: Value, source: Value, kind: str) -> Value:
    shape = x.type.shape
    if x.type.rank == 0:
        x, source = s.b.reshape(x, (1,)), s.b.reshape(source, (1,))
    dim = dim_of(dim, x.type.rank)
    index = _wrapped(s, s.b.reshape(index, (index.type.size,)), x.type.shape[dim])
    result = write(s, x, column(s, index), source, (dim,), dim, kind)
    return s.b.reshape(result, shape)


# Losses over class numbers: read one class of each row.


def _classes(s: Site, scores: Value, target: Value, ignore_index: int) -> tuple[int, Value, Value]:
    """The dim of the classes, which targets count, and the targets with the others at class 0."""
    dim = 1 if scores.type.rank > 1 else 0
    target = s.b.convert(target, i64)
    valid = s.compare("ne", target, ignore_index)
    return dim, valid, s.select(valid, target, 0, target.type)


def _class_weights(s: Site, weight: Value | None, target: Value, dtype: DType) -> Value | None:
    if weight is None:
        return None
    return s.b.convert(read(s, weight, column(s, target), (0,), 0), dtype)


def nll_loss(
    s: Site, scores: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> list[Value]:
    wide = compute_dtype(scores.type.dtype)
    dim, valid, safe = _classes(s, scores, target, ignore_index)
    shape = (*safe.type.shape[:dim], 1, *safe.type.shape[dim:])
    picked = read(s, scores, _coordinates(s, s.b.reshape(safe, shape), dim), range(len(shape)), 0)
    picked = s.b.convert(s.b.reshape(picked, safe.type.shape), wide)
    losses = s(ew.neg, picked)
    weights = _class_weights(s, weight, safe, wide)
    if weights is not None:
        losses = s(ew.mul, losses, weights)
    losses = s.select(valid, losses, 0, losses.type)
    dtype = s.type.dtype
    if reduction == 0:
        return [s.b.convert(losses, dtype), s.b.full(TensorType(dtype, ()), 0)]
    counted = (
        s.b.convert(valid, wide) if weights is None else s.select(valid, weights, 0, losses.type)
    )
    axes = tuple(range(losses.type.rank))
    sums, count = (s(rd.reduce_sum, v, dims=axes) if axes else v for v in (losses, counted))
    loss = s(ew.div, sums, count) if reduction == 1 else sums
    return [s.b.convert(loss, dtype), s.b.convert(count, dtype)]


def nll_loss_backward(
    s: Site,
    grad: Value,
    scores: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    """-grad (over the total weight, for a mean) at the target's class, 0 elsewhere."""
    wide = compute_dtype(scores.type.dtype)
    dim, valid, safe = _classes(s, scores, target, ignore_index)
    grad = s(ew.neg, s.b.convert(grad, wide))
    if reduction == 1:
        grad = s(ew.div, grad, s.b.convert(total_weight, wide))
    each = s.b.expand(grad, safe.type.shape)
    weights = _class_weights(s, weight, safe, wide)
    if weights is not None:
        each = s(ew.mul, each, weights)
    each = s.select(valid, each, 0, each.type)
    shape = scores.type.shape
    where = [d for d in range(len(shape)) if d != dim]
    classes = s(sh.iota, dtype=i64, shape=shape, dim=dim)
    hit = s(ew.compare, classes, s.b.expand(safe, shape, where), direction="eq")
    full = TensorType(wide, shape)
    return s.b.convert(s.select(hit, s.b.expand(each, shape, where), 0, full), s.type.dtype)


RULES: Rules = {
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_select.default: index_select,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.gather.default: gather,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter.reduce: scatter_with,
    aten.scatter.value_reduce: scatter_with,
    aten.scatter_add.default: scatter_add,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_add.default: index_add,
    aten.index_copy.default: index_copy,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss,
    aten.nll_loss2d_backward.default: nll_loss_backward,
}
