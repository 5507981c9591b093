"""Emitters of gather and scatter: XLA's own, with the mode made explicit."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plait.backends.jax.rule import Table, one
from plait.core_ir.op import Literal
from plait.core_ir.ops import index as ops

Ints = tuple[int, ...]


def _narrow(indices: jax.Array) -> jax.Array:
    """Indices in i32, those beyond its range as its bounds: lax itself would wrap them into range."""
    if indices.dtype.itemsize < 4 or indices.dtype == jnp.int32:
        return indices
    info = np.iinfo(np.int32)
    low = 0 if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) else info.min
    return jnp.clip(indices, low, info.max).astype(jnp.int32)


def _gather(
    x: jax.Array,
    indices: jax.Array,
    *,
    offset_dims: Ints,
    collapsed_slice_dims: Ints,
    start_index_map: Ints,
    operand_batching_dims: Ints,
    start_indices_batching_dims: Ints,
    slice_sizes: Ints,
    mode: str,
    fill_value: Literal | None = None,
) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(
        offset_dims,
        collapsed_slice_dims,
        start_index_map,
        operand_batching_dims,
        start_indices_batching_dims,
    )
    modes = lax.GatherScatterMode
    if fill_value is None:
        return lax.gather(x, _narrow(indices), numbers, slice_sizes, mode=modes.CLIP)
    number = fill_value.array.item()
    return lax.gather(
        x, _narrow(indices), numbers, slice_sizes, mode=modes.FILL_OR_DROP, fill_value=number
    )


_SCATTER = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


def _scatter(
    x: jax.Array,
    indices: jax.Array,
    updates: jax.Array,
    *,
    kind: str,
    update_window_dims: Ints,
    inserted_window_dims: Ints,
    scatter_dims_to_operand_dims: Ints,
    operand_batching_dims: Ints,
    scatter_indices_batching_dims: Ints,
    mode: str,
) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims,
        inserted_window_dims,
        scatter_dims_to_operand_dims,
        operand_batching_dims,
        scatter_indices_batching_dims,
    )
    modes = lax.GatherScatterMode
    chosen = modes.CLIP if mode == "clip" else modes.FILL_OR_DROP
    return _SCATTER[kind](x, _narrow(indices), updates, numbers, mode=chosen)


TABLE: Table = {ops.gather: one(_gather), ops.scatter: one(_scatter)}
