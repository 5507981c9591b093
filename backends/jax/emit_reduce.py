"""Emitters of reductions, cumulative ops, windows and sorting. Narrow floats accumulate in f32."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from plait.backends.jax.rule import Emitter, Table, cast, many, one, wide, widen
from plait.core_ir.ops import reduce as ops
from plait.core_ir.ops import window as window_ops
from plait.core_ir.types import DType, bool_, dtype_of

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
Binary = Callable[[Any, Any], Any]


def _reduction(combine: Binary, identity: Callable[[DType], Any]) -> Emitter:
    def apply(x: jax.Array, *, dims: Ints) -> jax.Array:
        broad = widen(x)
        start = np.asarray(identity(dtype_of(x.dtype))).astype(broad.dtype)
        return cast(lax.reduce(broad, start, combine, dims), x.dtype)

    return one(apply)


def _all_ones(dtype: DType) -> Any:
    return dtype == bool_ or -1


def _arg(function: Callable[..., jax.Array]) -> Emitter:
    def apply(x: jax.Array, *, dim: int, dtype: DType) -> jax.Array:
        x = cast(x, np.dtype(np.int32)) if dtype_of(x.dtype) == bool_ else widen(x)
        return cast(function(x, dim, np.dtype(np.int32)), dtype)

    return one(apply)


def _cumulative(function: Callable[..., jax.Array]) -> Emitter:
    def apply(x: jax.Array, *, dim: int, reverse: bool) -> jax.Array:
        return function(x, axis=dim, reverse=reverse)

    return one(wide(apply))


_WINDOW: dict[str, tuple[Binary, Callable[[DType], Any]]] = {
    "sum": (lax.add, lambda _: 0),
    "max": (lax.max, ops.lowest),
    "min": (lax.min, ops.highest),
}


def _reduce_window(
    x: jax.Array,
    *,
    kind: str,
    window: Ints,
    strides: Ints,
    padding: Pairs,
    base_dilation: Ints,
    window_dilation: Ints,
) -> jax.Array:
    combine, identity = _WINDOW[kind]
    broad = widen(x)
    start = np.asarray(identity(dtype_of(x.dtype))).astype(broad.dtype)
    out = lax.reduce_window(
        broad, start, combine, window, strides, padding, base_dilation, window_dilation
    )
    return cast(out, x.dtype)


def _select_and_scatter_add(
    source: jax.Array, x: jax.Array, *, window: Ints, strides: Ints, padding: Pairs
) -> jax.Array:
    """XLA's own op passes over NaN, so the place of each window's first largest element is found, then added to."""
    values = widen(x)
    places = lax.reshape(lax.iota(np.int32, x.size), x.shape)
    outside = np.int32(x.size)

    def better(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        (x_a, at_a), (x_b, at_b) = a, b
        nan_a, nan_b = lax.ne(x_a, x_a), lax.ne(x_b, x_b)
        larger = lax.bitwise_or(lax.gt(x_b, x_a), lax.bitwise_and(nan_b, lax.bitwise_not(nan_a)))
        equal = lax.bitwise_or(lax.eq(x_b, x_a), lax.bitwise_and(nan_a, nan_b))
        take = lax.bitwise_or(larger, lax.bitwise_and(equal, lax.lt(at_b, at_a)))
        return lax.select(take, x_b, x_a), lax.select(take, at_b, at_a)

    start = (np.asarray(-np.inf).astype(values.dtype), outside)
    _, chosen = lax.reduce_window((values, places), start, better, window, strides, padding)
    updates = lax.reshape(widen(source), (source.size,))
    indices = lax.reshape(chosen, (source.size, 1))
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    mode = lax.GatherScatterMode.FILL_OR_DROP
    zeros = lax.full((x.size,), 0, values.dtype)
    added = lax.scatter_add(zeros, indices, updates, numbers, mode=mode)
    return cast(lax.reshape(added, x.shape), x.dtype)


def _sort(*xs: jax.Array, dim: int, num_keys: int) -> tuple[jax.Array, ...]:
    # f8 keys go as f32, which keeps their order and their ties.
    operands = [widen(x) if x.dtype.itemsize == 1 else x for x in xs]
    ordered = lax.sort(operands, dimension=dim, is_stable=True, num_keys=num_keys)
    return tuple(cast(y, x.dtype) for x, y in zip(xs, ordered, strict=True))


def _top_k(x: jax.Array, *, k: int) -> tuple[jax.Array, jax.Array]:
    """By a stable ascending sort of keys that fall as x rises; lax.top_k orders NaN and zeros by their bits."""
    keys: tuple[jax.Array, ...]
    if dtype_of(x.dtype).is_integer:
        keys = (lax.bitwise_not(x),)
    else:
        broad = widen(x)
        keys = (lax.eq(broad, broad), lax.neg(broad))
    dim = x.ndim - 1
    indices = lax.broadcasted_iota(np.int32, x.shape, dim)
    *_, values, order = lax.sort(
        (*keys, x, indices), dimension=dim, is_stable=True, num_keys=len(keys)
    )
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(order, 0, k, axis=dim)


TABLE: Table = {
    ops.reduce_sum: _reduction(lax.add, lambda _: 0),
    ops.reduce_prod: _reduction(lax.mul, lambda _: 1),
    ops.reduce_max: _reduction(lax.max, ops.lowest),
    ops.reduce_min: _reduction(lax.min, ops.highest),
    ops.reduce_and: _reduction(lax.bitwise_and, _all_ones),
    ops.reduce_or: _reduction(lax.bitwise_or, lambda _: 0),
    ops.argmax: _arg(lax.argmax),
    ops.argmin: _arg(lax.argmin),
    ops.cumsum: _cumulative(lax.cumsum),
    ops.cumprod: _cumulative(lax.cumprod),
    ops.cummax: _cumulative(lax.cummax),
    ops.cummin: _cumulative(lax.cummin),
    ops.cumlogsumexp: _cumulative(lax.cumlogsumexp),
    window_ops.reduce_window: one(_reduce_window),
    window_ops.select_and_scatter_add: one(_select_and_scatter_add),
    ops.sort: many(_sort),
    ops.top_k: many(_top_k),
}
