"""Reductions over the positions of a window, as pooling does, and the gradient of the largest.

Sums of 8- and 16-bit floats accumulate in f32 and are rounded once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Op,
    Run,
    Types,
    choice_attr,
    ints_attr,
    pairs_attr,
)
from plait.core_ir.ops.reduce import highest, lowest, widened
from plait.core_ir.types import DType, TensorType, dtype_of


def _dilated(size: int, dilation: int) -> int:
    return 0 if size == 0 else (size - 1) * dilation + 1


def window_counts(
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> tuple[int, ...]:
    """Number of window positions in each dimension."""
    counts = []
    for n, k, s, (low, high), base, spread in zip(
        shape, window, strides, padding, base_dilation, window_dilation, strict=True
    ):
        room = _dilated(n, base) + low + high - _dilated(k, spread)
        counts.append(room // s + 1 if room >= 0 else 0)
    return tuple(counts)


def _window_views(x: Array, fill: Any, attrs: Attrs, counts: Sequence[int]) -> Iterator[Array]:
    """For each place in the window, in row-major order, the elements that stand there at each position."""
    base, padding = attrs["base_dilation"], attrs["padding"]
    size = [_dilated(n, d) + lo + hi for n, d, (lo, hi) in zip(x.shape, base, padding, strict=True)]
    padded = np.full([max(n, 0) for n in size], fill, x.dtype)
    for place in np.ndindex(*x.shape):
        at = tuple(p * d + lo for p, d, (lo, _) in zip(place, base, padding, strict=True))
        if all(0 <= a < n for a, n in zip(at, size, strict=True)):
            padded[at] = x[place]
    for place in product(*map(range, attrs["window"])):
        starts = [p * d for p, d in zip(place, attrs["window_dilation"], strict=True)]
        spans = zip(starts, counts, attrs["strides"], strict=True)
        yield padded[
            tuple(slice(a, a + (n - 1) * s + 1, s) if n else slice(0, 0) for a, n, s in spans)
        ]


_WINDOW_KINDS: dict[str, tuple[np.ufunc, Callable[[DType], Any]]] = {
    "sum": (np.add, lambda d: 0),
    "max": (np.maximum, lowest),
    "min": (np.minimum, highest),
}
_WINDOW_ATTRS: tuple[Attr, ...] = (
    ints_attr("window"),
    ints_attr("strides"),
    pairs_attr("padding"),
    ints_attr("base_dilation"),
    ints_attr("window_dilation"),
)


def _reduce_window_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    names = ("window", "strides", "padding", "base_dilation", "window_dilation")
    reduce_window.require(1, all(len(attrs[n]) == x.rank for n in names), f"{dict(attrs)} for {x}")
    positive = all(v >= 1 for n in names if n != "padding" for v in attrs[n])
    reduce_window.require(2, positive, dict(attrs))
    reduce_window.require(3, x.dtype.kind not in ("bool", "complex"), x)
    return (x.with_shape(window_counts(x.shape, *(attrs[n] for n in names))),)


def _reduce_window_evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
    x = operands[0]
    dtype = dtype_of(x.dtype)
    ufunc, identity = _WINDOW_KINDS[attrs["kind"]]
    wide = widened(x)
    names = ("window", "strides", "padding", "base_dilation", "window_dilation")
    counts = window_counts(x.shape, *(attrs[n] for n in names))
    start = np.asarray(identity(dtype)).astype(wide.dtype)
    out = np.full(counts, start, wide.dtype)
    with np.errstate(all="ignore"):
        for view in _window_views(wide, start, attrs, counts):
            out = ufunc(out, view)
    return (out.astype(x.dtype),)


def _window_flops(types: Types, attrs: Attrs, results: Types) -> int:
    return results[-1].size * int(np.prod(attrs["window"], dtype=np.int64))


reduce_window = Op(
    "reduce_window",
    _reduce_window_infer,
    _reduce_window_evaluate,
    1,
    (choice_attr("kind", *_WINDOW_KINDS), *_WINDOW_ATTRS),
    (
        "window, strides, padding and dilations have one entry for each dimension",
        "window, strides and dilations are at least 1",
        "the operand holds real numbers",
    ),
    _window_flops,
    doc="The reduction over each position of a window; padding is the identity of `kind`.",
)


def _ones(rank: int) -> tuple[int, ...]:
    return (1,) * rank


def _select_and_scatter_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    source, x = types
    names = ("window", "strides", "padding")
    op = select_and_scatter_add
    op.require(1, all(len(attrs[n]) == x.rank for n in names), f"{dict(attrs)} for {x}")
    op.require(2, all(v >= 1 for n in names[:2] for v in attrs[n]), dict(attrs))
    op.require(3, x.dtype.kind == "float" and source.dtype == x.dtype, f"{source} and {x}")
    one = _ones(x.rank)
    sizes = (attrs["window"], attrs["strides"], attrs["padding"])
    counts = window_counts(x.shape, *sizes, one, one)
    op.require(4, source.shape == counts, f"{source} for positions {list(counts)}")
    return (x,)


def _select_and_scatter_evaluate(
    operands: Sequence[Array], attrs: Attrs, _: Run
) -> Sequence[Array]:
    source, x = operands
    one = _ones(x.ndim)
    full = {**attrs, "base_dilation": one, "window_dilation": one}
    wide = widened(x)
    views = list(_window_views(wide, np.asarray(-np.inf).astype(wide.dtype), full, source.shape))
    inside = list(_window_views(np.ones(x.shape, bool), False, full, source.shape))
    # A padded place never wins: it ranks below every element, -inf included.
    best, chosen = np.zeros(source.shape, wide.dtype), np.full(source.shape, -1)
    for number, (view, real) in enumerate(zip(views, inside, strict=True)):
        better = real & ((chosen < 0) | (view > best) | (np.isnan(view) & ~np.isnan(best)))
        best, chosen = np.where(better, view, best), np.where(better, number, chosen)
    out = np.zeros(x.shape, wide.dtype)
    places = list(product(*map(range, attrs["window"])))
    for position in np.ndindex(*source.shape):
        number = int(chosen[position])
        if number >= 0:
            at = tuple(
                p * s + w - lo
                for p, s, w, (lo, _) in zip(
                    position, attrs["strides"], places[number], attrs["padding"], strict=True
                )
            )
            out[at] += source[position].astype(wide.dtype)
    return (out.astype(x.dtype),)


select_and_scatter_add = Op(
    "select_and_scatter_add",
    _select_and_scatter_infer,
    _select_and_scatter_evaluate,
    2,
    _WINDOW_ATTRS[:3],
    (
        "window, strides and padding have one entry for each dimension",
        "window and strides are at least 1",
        "source and operand have one floating-point dtype",
        "source has one element for each position of the window",
    ),
    _window_flops,
    doc="The gradient of a max window: select_and_scatter_add(source, operand) adds each source "
    "element to the first largest element (the first NaN, if any) of its window, in row-major "
    "order.",
)

FAMILY: tuple[Op, ...] = (reduce_window, select_and_scatter_add)
