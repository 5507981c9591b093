"""Ops that combine elements along dimensions: reductions, cumulative ops, windows, sorting.

Sums and products of 8- and 16-bit floats accumulate in f32 and are rounded once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Checks,
    Op,
    Run,
    Types,
    bool_attr,
    choice_attr,
    dtype_attr,
    int_attr,
    ints_attr,
    pairs_attr,
)
from plait.core_ir.types import DType, TensorType, dtype_of, i32


def _is_number(dtype: DType) -> bool:
    return dtype.kind != "bool"


def _is_bits(dtype: DType) -> bool:
    return dtype.is_integer or dtype.kind == "bool"


def _is_real(dtype: DType) -> bool:
    return dtype.kind in ("signed", "unsigned", "float")


def lowest(dtype: DType) -> Any:
    """The identity of max: -inf, or the least integer, or False."""
    return _bound(dtype, -1)


def highest(dtype: DType) -> Any:
    """The identity of min: inf (for f8e4m3fn, which has none, its largest number), or the largest integer."""
    return _bound(dtype, 1)


def _bound(dtype: DType, direction: int) -> Any:
    if dtype.kind == "bool":
        return direction > 0
    if dtype.is_integer:
        info = np.iinfo(str(dtype.numpy))
        return info.max if direction > 0 else info.min
    if dtype.name == "f8e4m3fn":
        return direction * 448.0
    return direction * np.inf


def _widened(x: Array) -> Array:
    dtype = dtype_of(x.dtype)
    return x.astype(np.float32) if dtype.kind == "float" and dtype.itemsize <= 2 else x


def _operand_flops(types: Types, _: Attrs, __: Types) -> int:
    return sum(t.size for t in types)


# Reductions over dims.


def _reduction(
    name: str,
    allowed: Callable[[DType], bool],
    words: str,
    ufunc: np.ufunc,
    identity: Callable[[DType], Any],
    doc: str,
) -> Op:
    check = Checks(
        name, f"the operand holds {words}", "dims are dimensions of the operand, each once"
    )

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (x,), dims = types, attrs["dims"]
        check(1, allowed(x.dtype), x)
        check(2, len(set(dims)) == len(dims) and all(0 <= d < x.rank for d in dims), dims, x)
        return (x.with_shape(n for d, n in enumerate(x.shape) if d not in dims),)

    def evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
        x = operands[0]
        dtype = dtype_of(x.dtype)
        wide = _widened(x)
        start = np.asarray(identity(dtype)).astype(wide.dtype)
        with np.errstate(all="ignore"):
            out = ufunc.reduce(wide, axis=tuple(attrs["dims"]), dtype=wide.dtype, initial=start)
        return (np.asarray(out).astype(x.dtype),)

    return Op(
        name, infer, evaluate, 1, (ints_attr("dims"),), check.constraints, _operand_flops, doc=doc
    )


reduce_sum = _reduction(
    "reduce_sum", _is_number, "numbers", np.add, lambda d: 0, "The sum over dims; empty: 0."
)
reduce_prod = _reduction(
    "reduce_prod", _is_number, "numbers", np.multiply, lambda d: 1, "The product; empty: 1."
)
reduce_max = _reduction(
    "reduce_max",
    _is_real,
    "real numbers",
    np.maximum,
    lowest,
    "The largest, NaN if any; empty: -inf.",
)
reduce_min = _reduction(
    "reduce_min",
    _is_real,
    "real numbers",
    np.minimum,
    highest,
    "The least, NaN if any; empty: inf.",
)
reduce_and = _reduction(
    "reduce_and", _is_bits, "bool or integers", np.bitwise_and, lambda d: d.kind == "bool" or -1, ""
)
reduce_or = _reduction("reduce_or", _is_bits, "bool or integers", np.bitwise_or, lambda d: 0, "")


def _arg(name: str, function: Callable[..., Any]) -> Op:
    check = Checks(
        name,
        "the operand holds real numbers or bool",
        "0 <= dim < rank",
        "dim is not empty",
        "dtype is an integer type",
    )

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (x,), dim = types, attrs["dim"]
        check(1, x.dtype.kind != "complex", x)
        check(2, 0 <= dim < x.rank, dim, x)
        check(3, x.shape[dim] > 0, x)
        check(4, attrs["dtype"].is_integer, attrs["dtype"])
        return (TensorType(attrs["dtype"], x.shape[:dim] + x.shape[dim + 1 :]),)

    def evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
        out = function(_widened(operands[0]), axis=attrs["dim"])
        return (np.asarray(out).astype(attrs["dtype"].numpy),)

    doc = "The index along `dim`, the first among equals; the first NaN wins."
    attrs = (int_attr("dim"), dtype_attr())
    return Op(name, infer, evaluate, 1, attrs, check.constraints, _operand_flops, doc=doc)


argmax = _arg("argmax", np.argmax)
argmin = _arg("argmin", np.argmin)


# Cumulative ops.


def _cumulative(
    name: str, scan: Callable[[Array, int], Any], allowed: Callable[[DType], bool]
) -> Op:
    check = Checks(
        name, "the operand's dtype is ordered where needed, and not bool", "0 <= dim < rank"
    )

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        check(1, allowed(types[0].dtype), types[0])
        check(2, 0 <= attrs["dim"] < types[0].rank, attrs["dim"], types[0])
        return (types[0],)

    def evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
        x, dim = operands[0], attrs["dim"]
        wide = _widened(np.flip(x, dim) if attrs["reverse"] else x)
        with np.errstate(all="ignore"):
            out = np.asarray(scan(wide, dim))
        return ((np.flip(out, dim) if attrs["reverse"] else out).astype(x.dtype),)

    doc = (
        "The reduction of each element with all before it along `dim` (behind it, with `reverse`)."
    )
    attrs = (int_attr("dim"), bool_attr("reverse"))
    return Op(name, infer, evaluate, 1, attrs, check.constraints, doc=doc)


def _is_float(dtype: DType) -> bool:
    return dtype.kind == "float"


cumsum = _cumulative("cumsum", lambda x, d: np.cumsum(x, d, dtype=x.dtype), _is_number)
cumprod = _cumulative("cumprod", lambda x, d: np.cumprod(x, d, dtype=x.dtype), _is_number)
cummax = _cumulative("cummax", lambda x, d: np.maximum.accumulate(x, d), _is_real)
cummin = _cumulative("cummin", lambda x, d: np.minimum.accumulate(x, d), _is_real)
cumlogsumexp = _cumulative("cumlogsumexp", lambda x, d: np.logaddexp.accumulate(x, d), _is_float)


# Windows.


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
    wide = _widened(x)
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
    wide = _widened(x)
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


# Sorting.


def _sort_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    sort.require(1, len(types) >= 1 and all(t.shape == types[0].shape for t in types), list(types))
    sort.require(2, 0 <= attrs["dim"] < types[0].rank, f"dim {attrs['dim']} of {types[0]}")
    sort.require(3, 1 <= attrs["num_keys"] <= len(types), attrs["num_keys"])
    keys = types[: attrs["num_keys"]]
    sort.require(4, all(t.dtype.kind != "complex" for t in keys), list(keys))
    return tuple(types)


def _sort_evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
    dim = attrs["dim"]
    # lexsort takes the last key first; it is stable and puts NaN last. Adding 0 makes -0 equal +0.
    keys = [_widened(k) for k in reversed(operands[: attrs["num_keys"]])]
    keys = [k + k.dtype.type(0) if k.dtype.kind == "f" else k for k in keys]
    order = np.lexsort(keys, axis=dim)
    return tuple(np.take_along_axis(x, order, dim) for x in operands)


sort = Op(
    "sort",
    _sort_infer,
    _sort_evaluate,
    None,
    (int_attr("dim"), int_attr("num_keys")),
    (
        "there is an operand, and all have one shape",
        "0 <= dim < rank",
        "1 <= num_keys <= number of operands",
        "keys are real or bool",
    ),
    doc="All operands permuted alike along `dim`, ascending by the first num_keys operands, the "
    "first counting most; stable; NaN last; -0 equals +0.",
)


def _top_k_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), k = types, attrs["k"]
    top_k.require(1, x.rank >= 1 and x.dtype.kind not in ("complex", "bool"), x)
    top_k.require(2, 0 <= k <= x.shape[-1], f"k {k} of {x}")
    values = x.with_shape((*x.shape[:-1], k))
    return (values, values.with_dtype(i32))


def _top_k_evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
    x, k = operands[0], attrs["k"]
    # Ascending order of the reversed row, read backwards: stable with the lower index first, NaN largest.
    wide = _widened(x)
    wide = wide + wide.dtype.type(0) if wide.dtype.kind == "f" else wide
    backwards = np.argsort(wide[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    order = (x.shape[-1] - 1 - backwards)[..., :k]
    return (np.take_along_axis(x, order, -1), order.astype(np.int32))


top_k = Op(
    "top_k",
    _top_k_infer,
    _top_k_evaluate,
    1,
    (int_attr("k"),),
    ("the operand has rank >= 1 and holds real numbers", "0 <= k <= size of the last dimension"),
    _operand_flops,
    doc="The k largest along the last dimension, descending, and their indices (i32); among equals "
    "the lower index first; NaN counts as largest.",
)

FAMILY: tuple[Op, ...] = (
    *(reduce_sum, reduce_prod, reduce_max, reduce_min, reduce_and, reduce_or, argmax, argmin),
    *(cumsum, cumprod, cummax, cummin, cumlogsumexp, reduce_window, select_and_scatter_add),
    *(sort, top_k),
)
