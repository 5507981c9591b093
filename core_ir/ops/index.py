"""Indexing ops: gather and scatter, exactly as XLA has them.

The last dimension of `indices` is the index vector; its other dimensions are the batch of windows.
A window is a block of x: it starts where its index vector says and has one size for each dimension
of x. Negative indices are plainly out of range.
"""

from collections.abc import Sequence

import numpy as np

from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Literal,
    Op,
    Run,
    Types,
    choice_attr,
    free,
    ints_attr,
)
from plait.core_ir.types import TensorType

Dims = tuple[int, ...]


def _distinct(dims: Dims, rank: int) -> bool:
    return len(set(dims)) == len(dims) and all(0 <= d < rank for d in dims)


def _ascending(dims: Dims, rank: int) -> bool:
    return _distinct(dims, rank) and list(dims) == sorted(dims)


def _without(shape: Dims, *dropped: Dims) -> Dims:
    gone = {d for dims in dropped for d in dims}
    return tuple(size for d, size in enumerate(shape) if d not in gone)


def _require_index_vector(
    op: Op, x: TensorType, indices: TensorType, attrs: Attrs, names: Dims
) -> None:
    """Constraints 1 to 4, which both ops share; `names` says which dims index vectors speak of."""
    dropped = attrs[_DROPPED[op.name]]
    x_batching, indices_batching = attrs["operand_batching_dims"], attrs[_BATCHING[op.name]]
    op.require(1, indices.dtype.is_integer and indices.rank > 0, indices)
    op.require(2, _distinct(names, x.rank) and len(names) == indices.shape[-1], (names, x, indices))
    ordered = _ascending(dropped, x.rank) and _ascending(x_batching, x.rank)
    apart = not set(x_batching) & {*dropped, *names}
    op.require(3, ordered and apart, (dropped, x_batching, names, x))
    paired = _distinct(indices_batching, indices.rank - 1) and len(indices_batching) == len(
        x_batching
    )
    op.require(4, paired, (indices_batching, x_batching, indices))
    sizes = [
        (x.shape[d], indices.shape[i]) for d, i in zip(x_batching, indices_batching, strict=True)
    ]
    op.require(4, all(a == b for a, b in sizes), (x, indices))


def _windows(
    shape: Dims, sizes: Dims, indices: Array, names: Dims, batching: tuple[Dims, Dims]
) -> tuple[Array, Array]:
    """Positions in row-major x of the elements of each window, `[*batch, *sizes]`; whether it fits.

    A window that does not fit is moved until it does.
    """
    batch = indices.shape[:-1]
    if indices.dtype == np.uint64:
        indices = np.minimum(indices, np.uint64(np.iinfo(np.int64).max))
    indices = indices.astype(np.int64)
    fits = np.ones(batch, np.bool_)
    positions = np.zeros(batch + (1,) * len(shape), np.int64)
    starts: dict[int, Array] = {}
    for component, d in enumerate(names):
        start, last = indices[..., component], shape[d] - sizes[d]
        fits &= (start >= 0) & (start <= last)
        starts[d] = np.clip(start, 0, last)
    for d, i in zip(*batching, strict=True):
        starts[d] = np.arange(shape[d]).reshape([-1 if j == i else 1 for j in range(len(batch))])
    for d, size in enumerate(sizes):
        offsets = np.arange(size).reshape([-1 if j == d else 1 for j in range(len(shape))])
        positions = positions * shape[d] + offsets
        if d in starts:
            positions = positions + starts[d].reshape(starts[d].shape + (1,) * len(shape))
    return positions, fits


def _gather_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, indices = types
    collapsed, batching = attrs["collapsed_slice_dims"], attrs["operand_batching_dims"]
    sizes, offset_dims = attrs["slice_sizes"], attrs["offset_dims"]
    _require_index_vector(gather, x, indices, attrs, attrs["start_index_map"])
    within = len(sizes) == x.rank and all(0 <= s <= n for s, n in zip(sizes, x.shape, strict=True))
    gather.require(5, within, (sizes, x))
    single = all(sizes[d] == 1 for d in collapsed)
    gather.require(5, single and all(sizes[d] == min(1, x.shape[d]) for d in batching), sizes)
    kept = _without(sizes, collapsed, batching)
    rank = len(kept) + indices.rank - 1
    gather.require(6, _ascending(offset_dims, rank) and len(offset_dims) == len(kept), offset_dims)
    fill = attrs.get("fill_value")
    gather.require(7, (fill is not None) == (attrs["mode"] == "fill"), (attrs["mode"], fill))
    gather.require(7, fill is None or fill.type == TensorType(x.dtype, ()), (fill, x))
    inner, outer = iter(kept), iter(indices.shape[:-1])
    return (x.with_shape(next(inner) if d in offset_dims else next(outer) for d in range(rank)),)


def _gather_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    x, indices = operands
    sizes, x_batching = attrs["slice_sizes"], attrs["operand_batching_dims"]
    batching = (x_batching, attrs["start_indices_batching_dims"])
    positions, fits = _windows(x.shape, sizes, indices, attrs["start_index_map"], batching)
    slices = x.reshape(-1)[positions]
    if attrs["mode"] == "fill":
        fits = fits.reshape(fits.shape + (1,) * x.ndim)
        slices = np.where(fits, slices, attrs["fill_value"].array)
    batch = indices.shape[:-1]
    slices = slices.reshape(batch + _without(sizes, attrs["collapsed_slice_dims"], x_batching))
    return (np.moveaxis(slices, range(len(batch), slices.ndim), attrs["offset_dims"]),)


_DROPPED = {"gather": "collapsed_slice_dims", "scatter": "inserted_window_dims"}
_BATCHING = {"gather": "start_indices_batching_dims", "scatter": "scatter_indices_batching_dims"}

gather = Op(
    "gather",
    _gather_infer,
    _gather_evaluate,
    2,
    (
        ints_attr("offset_dims"),
        ints_attr("collapsed_slice_dims"),
        ints_attr("start_index_map"),
        ints_attr("operand_batching_dims"),
        ints_attr("start_indices_batching_dims"),
        ints_attr("slice_sizes"),
        choice_attr("mode", "clip", "fill"),
        Attr("fill_value", lambda v: isinstance(v, Literal), "a Literal", optional=True),
    ),
    (
        "indices are integers of rank >= 1",
        "start_index_map has one dimension of x for each component of an index vector, none twice",
        "collapsed_slice_dims and operand_batching_dims are ascending dimensions of x, and no "
        "batching dimension is collapsed or in start_index_map",
        "start_indices_batching_dims has one dimension of indices, not the last, for each of "
        "operand_batching_dims, of the same size",
        "slice_sizes has one size for each dimension of x, at most the size of x there; 1 where "
        "collapsed, and min(1, size) where batching",
        "offset_dims are ascending dimensions of the result, one for each dimension of a slice "
        "that is neither collapsed nor batching",
        "fill_value is a scalar of the dtype of x, given exactly where mode is fill",
        "mode clip: a start is moved into the range where the whole slice fits; mode fill: a slice "
        "that does not fit whole is fill_value throughout",
    ),
    flops=free,
    movement=True,
    doc="(x, indices) -> one slice of x for each index vector. The dimensions of a slice are at "
    "offset_dims of the result, the batch dimensions of indices are the others, in order.",
)


def _scatter_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, indices, updates = types
    inserted, batching = attrs["inserted_window_dims"], attrs["operand_batching_dims"]
    window_dims, kind = attrs["update_window_dims"], attrs["kind"]
    _require_index_vector(scatter, x, indices, attrs, attrs["scatter_dims_to_operand_dims"])
    scatter.require(5, x.dtype == updates.dtype, (x, updates))
    banned = {"add": "bool", "mul": "bool", "min": "complex", "max": "complex"}
    scatter.require(6, banned.get(kind) != x.dtype.kind, (kind, x))
    most = _without(x.shape, inserted, batching)
    placed = _ascending(window_dims, updates.rank) and len(window_dims) == len(most)
    scatter.require(7, placed, (window_dims, x, updates))
    within = all(updates.shape[d] <= size for d, size in zip(window_dims, most, strict=True))
    scatter.require(8, within, (x, updates))
    batch = _without(updates.shape, window_dims)
    scatter.require(8, batch == indices.shape[:-1], (indices, updates))
    return (x,)


_COMBINE = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}


def _scatter_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    x, indices, updates = operands
    if x.size == 0:
        return (x,)
    inserted, x_batching = attrs["inserted_window_dims"], attrs["operand_batching_dims"]
    batch = indices.shape[:-1]
    window_dims = attrs["update_window_dims"]
    updates = np.moveaxis(updates, window_dims, range(len(batch), updates.ndim))
    kept = iter(updates.shape[len(batch) :])
    dropped = {*inserted, *x_batching}
    sizes = tuple(1 if d in dropped else next(kept) for d in range(x.ndim))
    batching = (x_batching, attrs["scatter_indices_batching_dims"])
    names = attrs["scatter_dims_to_operand_dims"]
    positions, fits = _windows(x.shape, sizes, indices, names, batching)
    if attrs["mode"] == "clip":
        fits = np.ones_like(fits)
    at = np.broadcast_to(positions, batch + sizes)[fits].reshape(-1)
    values = updates.reshape(batch + sizes)[fits].reshape(-1)
    result = x.reshape(-1).copy()
    with np.errstate(all="ignore"):
        if attrs["kind"] == "set":
            result[at] = values  # NumPy assigns in order: the last of equal positions stays
        else:
            _COMBINE[attrs["kind"]].at(result, at, values)
    return (result.reshape(x.shape),)


scatter = Op(
    "scatter",
    _scatter_infer,
    _scatter_evaluate,
    3,
    (
        choice_attr("kind", "set", "add", "mul", "min", "max"),
        ints_attr("update_window_dims"),
        ints_attr("inserted_window_dims"),
        ints_attr("scatter_dims_to_operand_dims"),
        ints_attr("operand_batching_dims"),
        ints_attr("scatter_indices_batching_dims"),
        choice_attr("mode", "drop", "clip"),
    ),
    (
        "indices are integers of rank >= 1",
        "scatter_dims_to_operand_dims has one dimension of x for each component of an index "
        "vector, none twice",
        "inserted_window_dims and operand_batching_dims are ascending dimensions of x, and no "
        "batching dimension is inserted or in scatter_dims_to_operand_dims",
        "scatter_indices_batching_dims has one dimension of indices, not the last, for each of "
        "operand_batching_dims, of the same size",
        "x and updates have one dtype",
        "kinds add and mul take numbers (not bool), kinds min and max anything but complex numbers",
        "update_window_dims are ascending dimensions of updates, one for each dimension of x that "
        "is neither inserted nor batching",
        "a window of updates is nowhere larger than x, and its other dimensions are the batch of "
        "indices",
        "updates are applied one after the other in row-major order of the batch of indices: with "
        "kind set the last of equal positions stays",
        "mode drop: a window that does not fit whole is skipped; mode clip: it is moved until it "
        "fits",
    ),
    flops=lambda types, attrs, results: 0 if attrs["kind"] == "set" else types[2].size,
    doc="(x, indices, updates) -> x with each window of updates combined into it at its index "
    "vector. min and max are NaN where either is; arithmetic is done in the dtype of x, one update "
    "at a time.",
)

FAMILY: tuple[Op, ...] = (gather, scatter)
