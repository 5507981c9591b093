"""Emitters of collectives, for a function under `shard_map` over a mesh with their axes. A `wait` is the value itself.

A group of one needs no mesh. XLA places the ends of what it starts; products, and maxima and minima that are scattered,
for which it has no collective, exchange the operands and reduce them in the order of ranks. Maxima and minima of floats
are reduced as integers, since the collectives of some platforms lose NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import numpy as np
from jax import lax

from plait.backends.jax.private import exchange, gather, permute, sum_scatter
from plait.backends.jax.rule import Emitter, Table, cast, widen
from plait.core_ir.graph import Eqn
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.core_ir.types import dtype_of, f8e4m3fn, f8e5m2, i16, u16

Attrs = Mapping[str, Any]
Arrays = Sequence[jax.Array]
Rule = Callable[[jax.Array, Attrs], jax.Array]

_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "product": lax.mul,
    "max": lax.max,
    "min": lax.min,
}
_ALL: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "sum": lax.psum,
    "max": lax.pmax,
    "min": lax.pmin,
}
_WIDER: dict[np.dtype[Any], Any] = {
    **dict.fromkeys((f8e4m3fn.numpy, f8e5m2.numpy), np.float32),
    **dict.fromkeys((i16.numpy, u16.numpy), np.int32),
}
"""Element types that libraries of collectives do not reduce, and those in which they are reduced instead."""


def _all_gather(x: jax.Array, attrs: Attrs) -> jax.Array:
    return gather(x, attrs["axis"], attrs["dim"])


def _all_reduce(x: jax.Array, attrs: Attrs) -> jax.Array:
    axis, reduction = attrs["axis"], attrs["reduction"]
    if reduction == "product":
        return _combined(gather(x[None], axis, 0), attrs)
    if reduction == "sum" or dtype_of(x.dtype).kind != "float":
        return _ALL[reduction](x, axis)
    ordered = _to_ordered(widen(x), reduction == "max")
    return cast(_from_ordered(_ALL[reduction](ordered, axis)), x.dtype)


def _to_ordered(x: jax.Array, nan_is_highest: bool) -> jax.Array:
    """Integers that compare as the floats do, NaN the highest or the lowest of all."""
    bits = lax.bitcast_convert_type(x, np.int32 if x.dtype == np.float32 else np.int64)
    bounds = np.iinfo(bits.dtype)
    ordered = lax.select(bits < 0, bits ^ bounds.max, bits)
    nan = lax.full_like(bits, bounds.max if nan_is_highest else bounds.min)
    return lax.select(x != x, nan, ordered)


def _from_ordered(ordered: jax.Array) -> jax.Array:
    bits = lax.select(ordered < 0, ordered ^ np.iinfo(ordered.dtype).max, ordered)
    return lax.bitcast_convert_type(bits, np.float32 if bits.dtype == np.int32 else np.float64)


def _reduce_scatter(x: jax.Array, attrs: Attrs) -> jax.Array:
    axis, dim, size = attrs["axis"], attrs["dim"], attrs["size"]
    if attrs["reduction"] == "sum":
        return sum_scatter(x, axis, dim)
    parts = x.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return _combined(exchange(parts, axis, dim, 0, tiled=False), attrs)


def _combined(of_ranks: jax.Array, attrs: Attrs) -> jax.Array:
    """The reduction over dimension 0, in order."""
    arrays = [widen(of_ranks[rank]) for rank in range(attrs["size"])]
    return cast(reduce(_COMBINE[attrs["reduction"]], arrays), of_ranks.dtype)


def _all_to_all(x: jax.Array, attrs: Attrs) -> jax.Array:
    return exchange(x, attrs["axis"], attrs["split_dim"], attrs["concat_dim"])


def _permute(x: jax.Array, attrs: Attrs) -> jax.Array:
    return permute(x, attrs["axis"], attrs["pairs"])


def _permute_among_others(x: jax.Array, attrs: Attrs) -> jax.Array:
    """XLA has all devices of a program meet in a permute, in a gather those of a group alone."""
    sources = np.full(attrs["size"], -1, np.int32)
    for source, target in attrs["pairs"]:
        sources[target] = source
    source = lax.dynamic_index_in_dim(sources, lax.axis_index(attrs["axis"]), keepdims=False)
    of_ranks = gather(x[None], attrs["axis"], 0)
    sent = lax.dynamic_index_in_dim(of_ranks, lax.max(source, np.int32(0)), keepdims=False)
    return lax.select(source >= 0, sent, lax.full_like(sent, 0))


def _permute_of_one(x: jax.Array, attrs: Attrs) -> jax.Array:
    return x if attrs["pairs"] else lax.full_like(x, 0)


def _wide(rule: Rule) -> Rule:
    def apply(x: jax.Array, attrs: Attrs) -> jax.Array:
        wider = _WIDER.get(x.dtype)
        return (
            rule(x, attrs)
            if wider is None
            else cast(rule(cast(x, np.dtype(wider)), attrs), x.dtype)
        )

    return apply


def _same(x: jax.Array, _: Attrs) -> jax.Array:
    return x


_RULES: dict[Op, tuple[Rule, Rule]] = {
    ops.all_gather: (_all_gather, _same),
    ops.reduce_scatter: (_wide(_reduce_scatter), _same),
    ops.all_reduce: (_wide(_all_reduce), _same),
    ops.all_to_all: (_all_to_all, _same),
    ops.permute: (_permute, _permute_of_one),
}
"""The rule of each collective, and that for a group of one."""


def _start(several: Rule, alone: Rule) -> Emitter:
    """The emitter of a start, by the rule for a group of several and that for a group of one."""

    def emit(eqn: Eqn, operands: Arrays) -> Arrays:
        (x,) = operands
        return ((several if eqn.attrs["size"] > 1 else alone)(x, eqn.attrs),)

    return emit


def _wait(_: Eqn, operands: Arrays) -> Arrays:
    return operands


def _axis_index(eqn: Eqn, _: Arrays) -> Arrays:
    if eqn.attrs["size"] == 1:
        return (lax.full((), 0, np.int32),)
    return (lax.axis_index(eqn.attrs["axis"]),)


TABLE: Table = {
    **{op: _start(*rules) for op, rules in _RULES.items()},
    ops.wait: _wait,
    ops.axis_index: _axis_index,
}

AMONG_OTHERS: Table = {ops.permute: _start(_permute_among_others, _permute_of_one)}
"""Those that are others where not all devices of a program run the same graph."""
