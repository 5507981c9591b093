"""Lowering rules: primitives that move data. Arrays of keys are u32 arrays with one more dimension, moved whole."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise
from plait.core_ir.ops import shape as ops
from plait.core_ir.types import dtype_of, i32, i64, u32, u64
from plait.frontends.jax.site import Rule, Site, ints, key_rank


def _iota(b: Builder, site: Site) -> Value:
    p = site.params
    dtype = dtype_of(p["dtype"])
    return b(ops.iota, dtype=dtype, shape=ints(p["shape"]), dim=int(p["dimension"]))


def _empty(b: Builder, site: Site) -> Value:
    """An array whose content nobody reads."""
    return b.full(site.result, 0)


def _broadcast_in_dim(b: Builder, site: Site, x: Value) -> Value:
    shape = site.result.shape
    dims = ints(site.params["broadcast_dimensions"])
    if key_rank(site):
        dims = (*dims, len(shape) - 1)
    if _only_adds_ones(x.type.shape, shape, dims):
        return b.reshape(x, shape)
    return b.expand(x, shape, dims)


def _only_adds_ones(old: Sequence[int], new: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a broadcast repeats nothing, so that it is a reshape."""
    return len(old) < len(new) and all(
        n == (old[dims.index(d)] if d in dims else 1) for d, n in enumerate(new)
    )


def _reshape(b: Builder, site: Site, x: Value) -> Value:
    dimensions = site.params.get("dimensions")
    if dimensions is not None:
        x = b.transpose(x, (*ints(dimensions), *range(len(dimensions), x.type.rank)))
    return b.reshape(x, site.result.shape)


def _reshape_only(b: Builder, site: Site, x: Value) -> Value:
    return b.reshape(x, site.result.shape)


def _transpose(b: Builder, site: Site, x: Value) -> Value:
    permutation = ints(site.params["permutation"])
    return b.transpose(x, (*permutation, *range(len(permutation), x.type.rank)))


def _rev(b: Builder, site: Site, x: Value) -> Value:
    return b(ops.reverse, x, dims=ints(site.params["dimensions"]))


def _slice(b: Builder, site: Site, x: Value) -> Value:
    p, shape = site.params, x.type.shape
    start, limit = ints(p["start_indices"]), ints(p["limit_indices"])
    strides = ints(p["strides"]) if p["strides"] is not None else (1,) * len(start)
    if key_rank(site):
        start, limit, strides = (*start, 0), (*limit, 2), (*strides, 1)
    if limit == shape and set(start) <= {0} and set(strides) <= {1}:
        return x
    return b(ops.slice_, x, start=start, limit=limit, strides=strides)


def _parts(b: Builder, x: Value, dim: int, sizes: Sequence[int]) -> list[Value]:
    """x cut along a dim into parts of these sizes."""
    shape = x.type.shape
    parts, at = [], 0
    for size in sizes:
        start = tuple(at if d == dim else 0 for d in range(len(shape)))
        limit = tuple(at + size if d == dim else n for d, n in enumerate(shape))
        parts.append(b(ops.slice_, x, start=start, limit=limit, strides=(1,) * len(shape)))
        at += size
    return parts


def _split(b: Builder, site: Site, x: Value) -> list[Value]:
    return _parts(b, x, int(site.params["axis"]), ints(site.params["sizes"]))


def _unstack(b: Builder, site: Site, x: Value) -> list[Value]:
    parts = _parts(b, x, int(site.params["axis"]), (1,) * len(site.results))
    return [b.reshape(part, type.shape) for part, type in zip(parts, site.results, strict=True)]


def _pad(b: Builder, site: Site, x: Value, filler: Value) -> Value:
    low, high, interior = (
        tuple(int(entry[i]) for entry in site.params["padding_config"]) for i in range(3)
    )
    return b(ops.pad, x, filler, low=low, high=high, interior=interior)


def _concatenate(b: Builder, site: Site, *xs: Value) -> Value:
    return b(ops.concatenate, *xs, dim=int(site.params["dimension"]))


def _stack(b: Builder, site: Site, *xs: Value) -> Value:
    dim = int(site.params["axis"])
    shape = tuple(1 if d == dim else n for d, n in enumerate(site.result.shape))
    return b(ops.concatenate, *(b.reshape(x, shape) for x in xs), dim=dim)


def _tile(b: Builder, site: Site, x: Value) -> Value:
    """Each dim of n elements, r times, is two: r and n, of which the first is broadcast."""
    reps, shape = ints(site.params["reps"]), x.type.shape
    if key_rank(site):
        reps = (*reps, 1)
    pairs = tuple(size for pair in zip(reps, shape, strict=True) for size in pair)
    return b.reshape(b.expand(x, pairs, range(1, len(pairs), 2)), site.result.shape)


def _start(b: Builder, index: Value) -> Value:
    """An index as the start of a slice: i32 or i64."""
    dtype = index.type.dtype
    if dtype in (i32, i64):
        return index
    if dtype in (u32, u64):
        most = b.full(index.type, int(np.iinfo(np.int32).max))
        index = b(elementwise.min_, index, most)
    return b.convert(index, i32)


def _key_start(b: Builder, site: Site, starts: Sequence[Value]) -> tuple[Value, ...]:
    found = tuple(_start(b, s) for s in starts)
    return (
        (*found, b.literal(0, found[0].type.dtype if found else i32)) if key_rank(site) else found
    )


def _dynamic_slice(b: Builder, site: Site, x: Value, *starts: Value) -> Value:
    return b(ops.dynamic_slice, x, *_key_start(b, site, starts), sizes=site.result.shape)


def _dynamic_update_slice(b: Builder, site: Site, x: Value, update: Value, *starts: Value) -> Value:
    return b(ops.dynamic_update_slice, x, update, *_key_start(b, site, starts))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "iota": _iota,
        "empty": _empty,
        "empty2": _empty,
        "broadcast_in_dim": _broadcast_in_dim,
        "reshape": _reshape,
        "squeeze": _reshape_only,
        "transpose": _transpose,
        "rev": _rev,
        "slice": _slice,
        "split": _split,
        "stack": _stack,
        "unstack": _unstack,
        "tile": _tile,
        "pad": _pad,
        "concatenate": _concatenate,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
    }
)
