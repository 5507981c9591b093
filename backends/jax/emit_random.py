"""Emitters of random bits: counters through the Threefry block, whatever JAX's own settings are."""

import math

import jax
import numpy as np
from jax import lax

from plait.backends.jax.private import threefry_block
from plait.backends.jax.rule import Table, cast, many, one
from plait.core_ir.ops import random as ops
from plait.core_ir.types import DType, dtype_of, u32, u64

Ints = tuple[int, ...]


def _block(key: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    k0, k1 = (
        lax.broadcast_in_dim(lax.index_in_dim(key, i, keepdims=False), x0.shape, ()) for i in (0, 1)
    )
    return threefry_block(k0, k1, x0, x1)


def _numbered_blocks(key: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The blocks of counters 0, 1, ..., num - 1 (64 bits, the high half first)."""
    if num <= 2**32:
        low = lax.iota(np.uint32, num)
        return _block(key, lax.full_like(low, 0), low)
    counter = lax.iota(np.uint64, num)
    high = lax.shift_right_logical(counter, lax.full_like(counter, 32))
    return _block(key, cast(high, u32), cast(counter, u32))


def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    data = lax.reshape(data, (1,))
    return lax.concatenate(_block(key, lax.full_like(data, 0), data), 0)


def _key_split(key: jax.Array, *, num: int) -> jax.Array:
    halves = _numbered_blocks(key, num)
    return lax.concatenate([lax.reshape(half, (num, 1)) for half in halves], 1)


def _random_bits(key: jax.Array, *, shape: Ints, dtype: DType) -> jax.Array:
    first, second = _numbered_blocks(key, math.prod(shape))
    if dtype == u64:
        high = cast(first, u64)
        bits = lax.bitwise_or(lax.shift_left(high, lax.full_like(high, 32)), cast(second, u64))
    else:
        bits = cast(lax.bitwise_xor(first, second), dtype)
    return lax.reshape(bits, shape)


def _seed_key(seed: jax.Array) -> jax.Array:
    low = cast(seed, u32)
    high = lax.full_like(low, 0)
    if dtype_of(seed.dtype).itemsize == 8:
        high = cast(lax.shift_right_logical(seed, lax.full_like(seed, 32)), u32)
    return lax.concatenate([lax.reshape(half, (1,)) for half in (high, low)], 0)


TABLE: Table = {
    ops.threefry2x32: many(threefry_block),
    ops.fold_in: one(_fold_in),
    ops.key_split: one(_key_split),
    ops.random_bits: one(_random_bits),
    ops.seed_key: one(_seed_key),
}
