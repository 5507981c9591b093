"""Emitters of the ops that move data."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from plait.backends.jax.rule import Table, one
from plait.core_ir.op import Literal
from plait.core_ir.ops import shape as ops
from plait.core_ir.types import DType

Ints = tuple[int, ...]


def _constant(*, value: Literal) -> jax.Array:
    return (
        lax.full((), value.array[()], value.array.dtype) if value.type.rank == 0 else _array(value)
    )


def _array(value: Literal) -> jax.Array:
    # Reshaping binds a primitive, so the array becomes a constant of the program being traced.
    return lax.reshape(value.array, value.type.shape)


def _iota(*, dtype: DType, shape: Ints, dim: int) -> jax.Array:
    wide = np.int64 if dtype.itemsize >= 8 else np.int32
    return lax.convert_element_type(lax.broadcasted_iota(wide, shape, dim), dtype.numpy)


def _reshape(x: jax.Array, *, shape: Ints) -> jax.Array:
    return lax.reshape(x, shape)


def _broadcast(x: jax.Array, *, shape: Ints, dims: Ints) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, dims)


def _slice(x: jax.Array, *, start: Ints, limit: Ints, strides: Ints) -> jax.Array:
    return lax.slice(x, start, limit, strides)


def _pad(x: jax.Array, value: jax.Array, *, low: Ints, high: Ints, interior: Ints) -> jax.Array:
    return lax.pad(x, value, tuple(zip(low, high, interior, strict=True)))


def _concatenate(*xs: jax.Array, dim: int) -> jax.Array:
    return lax.concatenate(xs, dim)


def _dynamic_slice(x: jax.Array, *starts: jax.Array, sizes: Ints) -> jax.Array:
    return lax.dynamic_slice(x, _uniform(starts), sizes, allow_negative_indices=False)


def _dynamic_update_slice(x: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, update, _uniform(starts), allow_negative_indices=False)


def _uniform(starts: Sequence[jax.Array]) -> list[jax.Array]:
    """Starts in one dtype, as XLA asks: the widest of theirs."""
    widest = max((s.dtype for s in starts), key=lambda d: d.itemsize, default=np.dtype(np.int32))
    return [lax.convert_element_type(s, widest) for s in starts]


TABLE: Table = {
    ops.constant: one(_constant),
    ops.iota: one(_iota),
    ops.reshape: one(_reshape),
    ops.transpose: one(lax.transpose),
    ops.broadcast: one(_broadcast),
    ops.slice_: one(_slice),
    ops.pad: one(_pad),
    ops.concatenate: one(_concatenate),
    ops.reverse: one(lambda x, dims: lax.rev(x, dims)),
    ops.dynamic_slice: one(_dynamic_slice),
    ops.dynamic_update_slice: one(_dynamic_update_slice),
}
