"""Ops that move data: constants, reshaping, slicing, padding. No arithmetic on elements."""

from collections.abc import Sequence
from operator import lt
from typing import Any

import numpy as np

from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Literal,
    Op,
    Run,
    Types,
    dtype_attr,
    free,
    int_attr,
    ints_attr,
)
from plait.core_ir.types import TensorType, i32, i64


def _movement(
    name: str,
    num_operands: int | None,
    attrs: tuple[Attr, ...],
    constraints: tuple[str, ...],
    infer: Any,
    evaluate: Any,
    doc: str,
) -> Op:
    return Op(
        name, infer, evaluate, num_operands, attrs, constraints, flops=free, movement=True, doc=doc
    )


constant = _movement(
    "constant",
    0,
    (Attr("value", lambda v: isinstance(v, Literal), "a Literal"),),
    (),
    lambda types, attrs: (attrs["value"].type,),
    lambda operands, attrs, run: (attrs["value"].array,),
    "An array that is part of the program.",
)


def _iota_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    iota.require(1, 0 <= attrs["dim"] < len(attrs["shape"]), f"dim {attrs['dim']}")
    iota.require(2, attrs["dtype"].kind != "bool", attrs["dtype"])
    return (TensorType(attrs["dtype"], attrs["shape"]),)


def _iota_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    shape, dim = attrs["shape"], attrs["dim"]
    line = np.arange(shape[dim]).astype(attrs["dtype"].numpy)
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    return (np.broadcast_to(line.reshape(sizes), shape),)


iota = _movement(
    "iota",
    0,
    (dtype_attr(), ints_attr("shape"), int_attr("dim")),
    ("0 <= dim < rank", "dtype is a number"),
    _iota_infer,
    _iota_evaluate,
    "0, 1, 2, ... along `dim`.",
)


def _reshape_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    result = types[0].with_shape(attrs["shape"])
    reshape.require(1, result.size == types[0].size, f"{types[0]} to {list(attrs['shape'])}")
    return (result,)


reshape = _movement(
    "reshape",
    1,
    (ints_attr("shape"),),
    ("the number of elements stays",),
    _reshape_infer,
    lambda operands, attrs, run: (np.reshape(operands[0], attrs["shape"]),),
    "The elements in row-major order in another shape.",
)


def _transpose_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    permutation, shape = attrs["permutation"], types[0].shape
    transpose.require(
        1, sorted(permutation) == list(range(len(shape))), f"{permutation} of {types[0]}"
    )
    return (types[0].with_shape(shape[p] for p in permutation),)


transpose = _movement(
    "transpose",
    1,
    (ints_attr("permutation"),),
    ("permutation holds each dimension once",),
    _transpose_infer,
    lambda operands, attrs, run: (np.transpose(operands[0], attrs["permutation"]),),
    "Result dimension i is operand dimension permutation[i].",
)


def _broadcast_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), shape, dims = types, attrs["shape"], attrs["dims"]
    ordered = len(dims) == x.rank and all(map(lt, dims, dims[1:]))
    broadcast.require(1, ordered and all(0 <= d < len(shape) for d in dims), f"dims {dims} of {x}")
    fits = all(size in (1, shape[d]) for size, d in zip(x.shape, dims, strict=True))
    broadcast.require(2, fits, f"{x} to {list(shape)} at {dims}")
    return (x.with_shape(shape),)


def _broadcast_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    sizes = [1] * len(attrs["shape"])
    for size, d in zip(operands[0].shape, attrs["dims"], strict=True):
        sizes[d] = size
    return (np.broadcast_to(operands[0].reshape(sizes), attrs["shape"]),)


broadcast = _movement(
    "broadcast",
    1,
    (ints_attr("shape"), ints_attr("dims")),
    (
        "dims has one result dimension for each operand dimension, strictly increasing",
        "each operand size is 1 or the result's size there",
    ),
    _broadcast_infer,
    _broadcast_evaluate,
    "Operand dimension i goes to result dimension dims[i]; all others repeat.",
)


def _slice_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), start, limit, strides = types, attrs["start"], attrs["limit"], attrs["strides"]
    slice_.require(
        1, len(start) == len(limit) == len(strides) == x.rank, f"{start}, {limit}, {strides} of {x}"
    )
    inside = all(0 <= a <= b <= n for a, b, n in zip(start, limit, x.shape, strict=True))
    slice_.require(2, inside, f"{start} to {limit} of {x}")
    slice_.require(3, all(s >= 1 for s in strides), strides)
    return (x.with_shape(-(-(b - a) // s) for a, b, s in zip(start, limit, strides, strict=True)),)


def _slice_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    spans = zip(attrs["start"], attrs["limit"], attrs["strides"], strict=True)
    return (operands[0][tuple(slice(a, b, s) for a, b, s in spans)],)


slice_ = _movement(
    "slice",
    1,
    (ints_attr("start"), ints_attr("limit"), ints_attr("strides")),
    (
        "start, limit and strides have one entry for each dimension",
        "0 <= start <= limit <= size",
        "strides are at least 1",
    ),
    _slice_infer,
    _slice_evaluate,
    "Elements start, start + stride, ... below limit, in each dimension.",
)


def _pad_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, value = types
    low, high, interior = attrs["low"], attrs["high"], attrs["interior"]
    pad.require(1, value == x.with_shape(()), f"{value} for {x}")
    pad.require(
        2, len(low) == len(high) == len(interior) == x.rank, f"{low}, {high}, {interior} of {x}"
    )
    pad.require(3, all(i >= 0 for i in interior), interior)
    shape = [
        n + a + b + max(n - 1, 0) * i
        for n, a, b, i in zip(x.shape, low, high, interior, strict=True)
    ]
    pad.require(4, all(n >= 0 for n in shape), f"shape {shape}")
    return (x.with_shape(shape),)


def _pad_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    x, value = operands
    margins = list(zip(attrs["low"], attrs["high"], strict=True))
    steps = [i + 1 for i in attrs["interior"]]
    spread = [(n - 1) * s + 1 if n else 0 for n, s in zip(x.shape, steps, strict=True)]
    # Grow first, then cut: what one side cuts may lie in the margin of the other.
    sizes = [n + max(a, 0) + max(b, 0) for n, (a, b) in zip(spread, margins, strict=True)]
    out = np.full(sizes, value, x.dtype)
    places = zip(spread, steps, margins, strict=True)
    out[tuple(slice(max(a, 0), max(a, 0) + n, s) for n, s, (a, _) in places)] = x
    return (out[tuple(slice(max(-a, 0), min(b, 0) or None) for a, b in margins)],)


pad = _movement(
    "pad",
    2,
    (ints_attr("low"), ints_attr("high"), ints_attr("interior")),
    (
        "the padding value is a scalar of the operand's dtype",
        "low, high and interior have one entry for each dimension",
        "interior is at least 0",
        "the result has no negative size",
    ),
    _pad_infer,
    _pad_evaluate,
    "pad(x, value): `low` before, `high` behind (negative ones cut), `interior` between elements.",
)


def _concatenate_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dim = attrs["dim"]
    concatenate.require(1, len(types) >= 1, "no operand")
    first = types[0]
    concatenate.require(2, 0 <= dim < first.rank, f"dim {dim} of {first}")

    def rest(t: TensorType) -> tuple[object, ...]:
        return (t.dtype, t.shape[:dim], t.shape[dim + 1 :], t.rank)

    concatenate.require(3, all(rest(t) == rest(first) for t in types), list(types))
    total = sum(t.shape[dim] for t in types)
    return (first.with_shape((*first.shape[:dim], total, *first.shape[dim + 1 :])),)


concatenate = _movement(
    "concatenate",
    None,
    (int_attr("dim"),),
    ("there is an operand", "0 <= dim < rank", "operands differ in size along dim only"),
    _concatenate_infer,
    lambda operands, attrs, run: (np.concatenate(operands, attrs["dim"]),),
    "The operands one after another along `dim`.",
)


def _reverse_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dims = attrs["dims"]
    reverse.require(
        1, len(set(dims)) == len(dims) and all(0 <= d < types[0].rank for d in dims), dims
    )
    return (types[0],)


reverse = _movement(
    "reverse",
    1,
    (ints_attr("dims"),),
    ("dims are dimensions of the operand, each once",),
    _reverse_infer,
    lambda operands, attrs, run: (np.flip(operands[0], attrs["dims"]),),
    "The elements in opposite order along `dims`.",
)


def _check_starts(op: Op, first: int, starts: Types, rank: int) -> None:
    op.require(first, len(starts) == rank, f"{len(starts)} starts for rank {rank}")
    op.require(first + 1, all(t.rank == 0 and t.dtype in (i32, i64) for t in starts), list(starts))


def _window(
    shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Array]
) -> tuple[slice, ...]:
    """Slices of `sizes` at `starts`, clamped so that they fit."""
    fitted = (max(0, min(int(s), n - k)) for n, k, s in zip(shape, sizes, starts, strict=True))
    return tuple(slice(a, a + k) for a, k in zip(fitted, sizes, strict=True))


def _dynamic_slice_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dynamic_slice.require(1, len(types) >= 1, "no operand")
    x, sizes = types[0], attrs["sizes"]
    _check_starts(dynamic_slice, 2, types[1:], x.rank)
    fits = len(sizes) == x.rank and all(0 <= k <= n for k, n in zip(sizes, x.shape, strict=True))
    dynamic_slice.require(4, fits, f"{sizes} of {x}")
    return (x.with_shape(sizes),)


dynamic_slice = _movement(
    "dynamic_slice",
    None,
    (ints_attr("sizes"),),
    (
        "there is an operand",
        "there is one start for each dimension",
        "starts are scalars of i32 or i64",
        "sizes fit the operand",
    ),
    _dynamic_slice_infer,
    lambda operands, attrs, run: (
        operands[0][_window(operands[0].shape, attrs["sizes"], operands[1:])],
    ),
    "dynamic_slice(x, *starts): a window of `sizes`; starts are clamped so that it fits.",
)


def _dynamic_update_slice_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dynamic_update_slice.require(1, len(types) >= 2, f"{len(types)} operands")
    x, update = types[:2]
    _check_starts(dynamic_update_slice, 2, types[2:], x.rank)
    fits = (
        update.dtype == x.dtype
        and update.rank == x.rank
        and all(k <= n for k, n in zip(update.shape, x.shape, strict=True))
    )
    dynamic_update_slice.require(4, fits, f"{update} in {x}")
    return (x,)


def _dynamic_update_slice_evaluate(
    operands: Sequence[Array], attrs: Attrs, run: Run
) -> Sequence[Array]:
    x, update, *starts = operands
    out = np.array(x)
    out[_window(x.shape, update.shape, starts)] = update
    return (out,)


dynamic_update_slice = _movement(
    "dynamic_update_slice",
    None,
    (),
    (
        "there are an operand and an update",
        "there is one start for each dimension",
        "starts are scalars of i32 or i64",
        "the update has the operand's dtype and fits it",
    ),
    _dynamic_update_slice_infer,
    _dynamic_update_slice_evaluate,
    "dynamic_update_slice(x, update, *starts): x with a window replaced; starts are clamped so "
    "that it fits.",
)

FAMILY: tuple[Op, ...] = (
    *(constant, iota, reshape, transpose, broadcast, slice_, pad, concatenate, reverse),
    *(dynamic_slice, dynamic_update_slice),
)
