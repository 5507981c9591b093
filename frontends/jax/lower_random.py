"""Lowering rules: keys and random bits, for one key and, by the same counters, for arrays of keys."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise
from plait.core_ir.ops import random as ops
from plait.core_ir.ops import shape as moves
from plait.core_ir.types import DTYPES, TensorType, u32, u64
from plait.frontends.jax.jaxpr import threefry_partitionable
from plait.frontends.jax.site import Rule, Site, ints, key_word


def _require_partitionable(site: Site) -> None:
    if not threefry_partitionable():
        raise CaptureError(
            f"{site.source}: random bits are those of jax_threefry_partitionable=True, which is off; turn it on"
        )


def _random_seed(b: Builder, site: Site, seed: Value) -> Value:
    if seed.type.rank == 0:
        return b(ops.seed_key, seed)
    high = b.full(seed.type.with_dtype(u32), 0)
    if seed.type.dtype.itemsize == 8:
        shifted = b(elementwise.shift_right_logical, seed, b.full(seed.type, 32))
        high = b.convert(shifted, u32)
    return _pack(b, high, b.convert(seed, u32))


def _pack(b: Builder, *words: Value) -> Value:
    """u32[...] twice -> u32[..., 2]."""
    shape = words[0].type.shape
    return b(moves.concatenate, *(b.reshape(w, (*shape, 1)) for w in words), dim=len(shape))


def _random_fold_in(b: Builder, site: Site, key: Value, data: Value) -> Value:
    data = b.convert(data, u32)
    if key.type.rank == 1 and data.type.rank == 0:
        return b(ops.fold_in, key, data)
    shape = site.result.shape[:-1]
    key, data = b.expand(key, (*shape, 2)), b.expand(data, shape)
    zero = b.full(data.type, 0)
    return _pack(b, *b.emit(ops.threefry2x32, key_word(b, key, 0), key_word(b, key, 1), zero, data))


def _counted(b: Builder, keys: Value, shape: tuple[int, ...]) -> tuple[Value, ...]:
    """Threefry of the 64-bit numbers of the elements of `shape`, for each of some keys: two u32[*keys, *shape]."""
    rank, outer = len(shape), keys.type.shape[:-1]
    full = (*outer, *shape)
    if prod(shape) >= 2**32:
        raise CaptureError(f"random bits of shape {shape} for an array of keys are too many")
    number = b(moves.iota, dtype=u32, shape=(prod(shape),), dim=0)
    low = b.expand(b.reshape(number, shape), full, range(len(outer), len(outer) + rank))
    high = b.full(TensorType(u32, full), 0)
    words = (b.expand(key_word(b, keys, i), full, range(len(outer))) for i in (0, 1))
    return b.emit(ops.threefry2x32, *words, high, low)


def _random_split(b: Builder, site: Site, key: Value) -> Value:
    _require_partitionable(site)
    shape = ints(site.params["shape"])
    if key.type.rank == 1:
        return b.reshape(b(ops.key_split, key, num=prod(shape)), site.result.shape)
    return _pack(b, *_counted(b, key, shape))


def _random_bits(b: Builder, site: Site, key: Value) -> Value:
    _require_partitionable(site)
    shape = ints(site.params["shape"])
    dtype = DTYPES[f"u{site.params['bit_width']}"]
    if key.type.rank == 1:
        return b(ops.random_bits, key, shape=shape, dtype=dtype)
    first, second = _counted(b, key, shape)
    if dtype == u64:
        high = b(
            elementwise.shift_left, b.convert(first, u64), b.full(first.type.with_dtype(u64), 32)
        )
        return b(elementwise.or_, high, b.convert(second, u64))
    mixed = b(elementwise.xor, first, second)
    return mixed if dtype == u32 else b.convert(mixed, dtype)


def _same_key(b: Builder, site: Site, key: Value) -> Value:
    return key


def _threefry2x32(b: Builder, site: Site, *words: Value) -> tuple[Value, ...]:
    shape = site.results[0].shape
    return b.emit(ops.threefry2x32, *(b.expand(w, shape) for w in words))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "random_seed": _random_seed,
        "random_fold_in": _random_fold_in,
        "random_split": _random_split,
        "random_bits": _random_bits,
        "random_wrap": _same_key,
        "random_unwrap": _same_key,
        "random_clone": _same_key,
        "threefry2x32": _threefry2x32,
    }
)
