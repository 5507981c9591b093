"""Reading and writing a tensor at computed places: what the rules of indexing make gather and scatter of.

An index out of range raises in torch. Here a read of it gives NaN (the lowest number of a signed type, the highest of
an unsigned one), and a write to it is dropped, so that no wrong number looks like a right one.
"""

import math
from collections.abc import Sequence

import numpy as np

from plait.core_ir.graph import Value
from plait.core_ir.op import Literal
from plait.core_ir.ops import index as ix
from plait.core_ir.types import DType, bool_
from plait.frontends.torch.dtypes import integer_bounds
from plait.frontends.torch.rules import Site


def _missing(dtype: DType) -> Literal:
    """What a read out of range gives."""
    if dtype.is_inexact:
        return Literal(np.asarray(math.nan).astype(dtype.numpy))
    if dtype == bool_:
        return Literal(np.asarray(False))
    low, high = integer_bounds(dtype)
    return Literal(np.asarray(low if dtype.kind == "signed" else high, dtype.numpy))


def read(s: Site, x: Value, index: Value, dims: Sequence[int], at: int) -> Value:
    """x at `index` [*B, len(dims)] in `dims`: the other dims of x, with B inserted at position `at`."""
    rest = x.type.rank - len(dims)
    batch = index.type.rank - 1
    offsets = [i if i < at else i + batch for i in range(rest)]
    return s(
        ix.gather,
        x,
        index,
        offset_dims=tuple(offsets),
        collapsed_slice_dims=tuple(sorted(dims)),
        start_index_map=tuple(dims),
        operand_batching_dims=(),
        start_indices_batching_dims=(),
        slice_sizes=tuple(1 if d in dims else n for d, n in enumerate(x.type.shape)),
        mode="fill",
        fill_value=_missing(x.type.dtype),
    )


def write(
    s: Site, x: Value, index: Value, updates: Value, dims: Sequence[int], at: int, kind: str
) -> Value:
    """x with `updates`, of the shape that `read` gives, written at `index`."""
    rest = x.type.rank - len(dims)
    batch = index.type.rank - 1
    windows = [i if i < at else i + batch for i in range(rest)]
    return s(
        ix.scatter,
        x,
        index,
        updates,
        kind=kind,
        update_window_dims=tuple(windows),
        inserted_window_dims=tuple(sorted(dims)),
        scatter_dims_to_operand_dims=tuple(dims),
        operand_batching_dims=(),
        scatter_indices_batching_dims=(),
        mode="drop",
    )
