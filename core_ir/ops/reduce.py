"""Ops that combine elements along dimensions: reductions, cumulative ops, sorting.

Sums and products of 8- and 16-bit floats accumulate in f32 and are rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plait.core_ir.op import (
    Array,
    Attrs,
    Checks,
    Op,
    Run,
    Types,
    bool_attr,
    dtype_attr,
    int_attr,
    ints_attr,
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


def widened(x: Array) -> Array:
    """The array in f32 where its floats have 8 or 16 bits."""
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
        wide = widened(x)
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
        out = function(widened(operands[0]), axis=attrs["dim"])
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
        wide = widened(np.flip(x, dim) if attrs["reverse"] else x)
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
    keys = [widened(k) for k in reversed(operands[: attrs["num_keys"]])]
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
    wide = widened(x)
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
    *(cumsum, cumprod, cummax, cummin, cumlogsumexp),
    *(sort, top_k),
)
