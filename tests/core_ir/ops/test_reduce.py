"""Reductions, cumulative ops, windows and sorting against Python, torch and jax.lax."""

import functools
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import TypeRuleError
from plait.core_ir.op import Op
from plait.core_ir.ops.reduce import (
    FAMILY,
    argmax,
    argmin,
    cumlogsumexp,
    cummax,
    cummin,
    cumprod,
    cumsum,
    reduce_and,
    reduce_max,
    reduce_min,
    reduce_or,
    reduce_prod,
    reduce_sum,
    sort,
    top_k,
)
from plait.core_ir.ops.window import FAMILY as WINDOWS
from plait.core_ir.ops.window import reduce_window, select_and_scatter_add
from plait.core_ir.types import DTYPES, DType, TensorType

NAMES = list(DTYPES)
FLOATS = [n for n in NAMES if DTYPES[n].kind == "float"]
INTEGERS = [n for n in NAMES if DTYPES[n].is_integer]
REAL = FLOATS + INTEGERS
REDUCTIONS = (reduce_sum, reduce_prod, reduce_max, reduce_min, reduce_and, reduce_or)
CUMULATIVE = (cumsum, cumprod, cummax, cummin, cumlogsumexp)


def few(dtype: str, shape: Any, seed: int = 0, nan: bool = False) -> np.ndarray:
    """Small numbers with many ties; floats with -0 and infinities, and NaN where asked for."""
    d = DTYPES[dtype]
    pool: list[Any] = [0, 1, 2, 3] if d.kind != "signed" else [-2, -1, 0, 1]
    if d.kind == "float":
        pool = [-1, -0.0, 0.0, 2, math.inf, -math.inf, *([math.nan] * 2 if nan else [])]
    rng = np.random.default_rng([seed, *np.atleast_1d(shape)])
    return np.array(pool).astype(d.numpy)[rng.integers(0, len(pool), shape)]


def plain(x: np.ndarray) -> np.ndarray:
    """Narrow floats as f64, everything else as it is."""
    return x.astype(np.float64) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x


def wrapped(number: int, d: DType) -> int:
    number %= 2 ** (8 * d.itemsize)
    top = d.kind == "signed" and number >= 2 ** (8 * d.itemsize - 1)
    return number - 2 ** (8 * d.itemsize) if top else number


def larger(a: Any, b: Any) -> Any:
    return math.nan if a != a or b != b else max(a, b)


def smaller(a: Any, b: Any) -> Any:
    return math.nan if a != a or b != b else min(a, b)


PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": larger,
    "min": smaller,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}


def takes(op: Op, *types: TensorType, **attrs: Any) -> bool:
    try:
        op.types(types, attrs)
    except TypeRuleError:
        return False
    return True


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
def test_reductions_equal_a_loop(evaluate: Any, op: Op, dtype: str) -> None:
    d = DTYPES[dtype]
    x = few(dtype, (3, 4, 2)) if d.kind != "complex" else few("i32", (3, 4, 2)).astype(d.numpy)
    if not takes(op, TensorType(d, x.shape), dims=(1,)):
        return
    combine = PYTHON[op.name.removeprefix("reduce_")]
    for dims in ((0,), (1,), (2, 0), (0, 1, 2)):
        (got,) = evaluate(op, x, dims=dims)
        rest = [i for i in range(3) if i not in dims]
        rows = plain(x).transpose(*rest, *dims).reshape(*(x.shape[i] for i in rest), -1)
        flat = rows.reshape(-1, rows.shape[-1]).tolist()
        expected = [functools.reduce(combine, row) for row in flat]
        if d.is_integer:
            expected = [wrapped(n, d) for n in expected]
        with np.errstate(all="ignore"):
            wide = plain(np.array(expected).astype(d.numpy)).reshape(got.shape)
        np.testing.assert_array_equal(plain(got), wide, err_msg=str(dims))


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
def test_reductions_of_nothing_give_the_identity(evaluate: Any, op: Op, dtype: str) -> None:
    d = DTYPES[dtype]
    if not takes(op, TensorType(d, (0, 2)), dims=(0,)):
        return
    info = np.iinfo(d.numpy) if d.is_integer else None
    infinity = 448.0 if dtype == "f8e4m3fn" else math.inf  # it has no infinity
    expected: Any = {
        "reduce_sum": 0,
        "reduce_prod": 1,
        "reduce_max": info.min if info else -infinity,
        "reduce_min": info.max if info else infinity,
        "reduce_and": True if info is None else wrapped(-1, d),
        "reduce_or": 0,
    }[op.name]
    (got,) = evaluate(op, np.zeros((0, 2), d.numpy), dims=(0,))
    np.testing.assert_array_equal(plain(got), np.full(2, expected, plain(got).dtype))
    (kept,) = evaluate(op, np.ones((2, 1), d.numpy), dims=())
    np.testing.assert_array_equal(plain(kept), plain(np.ones((2, 1), d.numpy)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_max_and_min_are_nan_where_any_is(evaluate: Any, dtype: str) -> None:
    x = np.array([[1, math.nan], [math.nan, 2], [3, 4]]).astype(DTYPES[dtype].numpy)
    for op, number in ((reduce_max, 4), (reduce_min, 3)):
        (got,) = evaluate(op, x, dims=(1,))
        np.testing.assert_array_equal(got.astype(float), [math.nan, math.nan, number])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f8e4m3fn", "f8e5m2"])
def test_narrow_floats_are_summed_in_f32_and_rounded_once(evaluate: Any, dtype: str) -> None:
    d = DTYPES[dtype]
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 0.5, (3, 400)).astype(d.numpy)
    exact = x.astype(float).sum(1)
    step = float(ml_dtypes.finfo(d.numpy).eps)
    (got,) = evaluate(reduce_sum, x, dims=(1,))
    np.testing.assert_allclose(got.astype(float), exact, rtol=0.51 * step)
    (last,) = evaluate(cumsum, x, dim=1, reverse=False)
    np.testing.assert_allclose(last[:, -1].astype(float), exact, rtol=0.51 * step)


@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
def test_reductions_c1_dtypes(op: Op) -> None:
    kinds = {
        "numbers": {"signed", "unsigned", "float", "complex"},
        "real numbers": {"signed", "unsigned", "float"},
        "bool or integers": {"bool", "signed", "unsigned"},
    }[op.constraints[0].removeprefix("the operand holds ")]
    for d in DTYPES.values():
        if d.kind in kinds:
            assert op.types([TensorType(d, (2, 3))], {"dims": (0,)}) == (TensorType(d, (3,)),)
        else:
            with pytest.raises(TypeRuleError, match=f"^{op.name}: C1: "):
                op.types([TensorType(d, (2, 3))], {"dims": (0,)})


@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
def test_reductions_c2_dims(refuses: Any, op: Op) -> None:
    for dims in ((2,), (-1,), (0, 0)):
        refuses(op, 2, "i32[2, 3]", dims=dims)


# argmax, argmin


@pytest.mark.parametrize("dtype", [*REAL, "bool"])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize(("op", "better"), [(argmax, max), (argmin, min)])
def test_arg_is_the_first_of_equals_and_the_first_nan_wins(
    evaluate: Any, op: Op, better: Any, dtype: str, nan: bool
) -> None:
    x = few(dtype, (3, 7, 2), nan=nan) if dtype != "bool" else few("u8", (3, 7, 2)) > 1
    (got,) = evaluate(op, x, dim=1, dtype=DTYPES["i32"])
    for i, j in product(range(3), range(2)):
        row = plain(x)[i, :, j].tolist()
        nans = [n for n, v in enumerate(row) if v != v]
        assert got[i, j] == (nans[0] if nans else row.index(better(row)))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_arg_gives_any_integer_dtype(evaluate: Any, dtype: str) -> None:
    (got,) = evaluate(argmax, np.float32([1, 5, 2]), dim=0, dtype=DTYPES[dtype])
    assert got == 1
    assert got.shape == ()


@pytest.mark.parametrize("op", [argmax, argmin], ids=str)
def test_arg_c1_no_complex_numbers(refuses: Any, op: Op) -> None:
    refuses(op, 1, "c64[3]", dim=0, dtype=DTYPES["i32"])


@pytest.mark.parametrize("op", [argmax, argmin], ids=str)
def test_arg_c2_dim(refuses: Any, op: Op) -> None:
    for dim in (-1, 1):
        refuses(op, 2, "f32[3]", dim=dim, dtype=DTYPES["i32"])


@pytest.mark.parametrize("op", [argmax, argmin], ids=str)
def test_arg_c3_dim_is_not_empty(refuses: Any, accepts: Any, op: Op) -> None:
    refuses(op, 3, "f32[3, 0]", dim=1, dtype=DTYPES["i32"])
    (result,) = accepts(op, "f32[3, 0]", dim=0, dtype=DTYPES["i64"])
    assert str(result) == "i64[0]"


@pytest.mark.parametrize("op", [argmax, argmin], ids=str)
def test_arg_c4_dtype(refuses: Any, op: Op) -> None:
    for name in ("f32", "bool"):
        refuses(op, 4, "f32[3]", dim=0, dtype=DTYPES[name])


# Cumulative ops


@pytest.mark.parametrize("dtype", [n for n in NAMES if n not in ("bool", "c64", "c128")])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", CUMULATIVE[:4], ids=str)
def test_cumulative_ops_equal_a_loop(evaluate: Any, op: Op, reverse: bool, dtype: str) -> None:
    d = DTYPES[dtype]
    x = few(dtype, (4, 5), nan=d.kind == "float")
    combine = PYTHON[op.name.removeprefix("cum")]
    (got,) = evaluate(op, x, dim=1, reverse=reverse)
    for row, line in zip(plain(x).tolist(), plain(got).tolist(), strict=True):
        for i in range(5):
            expected = functools.reduce(combine, row[i:][::-1] if reverse else row[: i + 1])
            expected = wrapped(expected, d) if d.is_integer else expected
            with np.errstate(all="ignore"):
                expected = plain(np.array(expected).astype(d.numpy))
            np.testing.assert_array_equal(line[i], expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reverse", [False, True])
def test_cumlogsumexp_equals_torch(evaluate: Any, dtype: str, reverse: bool) -> None:
    d = DTYPES[dtype]
    numbers = [[0.5, -2, 3, -math.inf], [-math.inf, -math.inf, 1, 90], [1, math.nan, 0, 2]]
    x = np.array(numbers).astype(d.numpy)
    (got,) = evaluate(cumlogsumexp, x, dim=1, reverse=reverse)
    wide = torch.from_numpy(x.astype(float))
    exact = torch.logcumsumexp(wide.flip(1) if reverse else wide, 1)
    exact = (exact.flip(1) if reverse else exact).numpy()
    with np.errstate(all="ignore"):
        expected = exact.astype(d.numpy).astype(float)
    step = {"f64": 1e-14, "f32": 1e-6}.get(dtype) or float(ml_dtypes.finfo(d.numpy).eps)
    np.testing.assert_allclose(got.astype(float), expected, rtol=step)


@pytest.mark.parametrize("op", CUMULATIVE, ids=str)
def test_cumulative_ops_of_empty_arrays(evaluate: Any, op: Op) -> None:
    for dim in (0, 1):
        (got,) = evaluate(op, np.zeros((3, 0), np.float32), dim=dim, reverse=True)
        assert got.shape == (3, 0)


@pytest.mark.parametrize("op", CUMULATIVE, ids=str)
def test_cumulative_ops_c1_dtypes(refuses: Any, op: Op) -> None:
    refuses(op, 1, "bool[3]", dim=0, reverse=False)
    if op in (cummax, cummin, cumlogsumexp):
        refuses(op, 1, "c64[3]", dim=0, reverse=False)
    if op is cumlogsumexp:
        refuses(op, 1, "i32[3]", dim=0, reverse=False)


@pytest.mark.parametrize("op", CUMULATIVE, ids=str)
def test_cumulative_ops_c2_dim(refuses: Any, op: Op) -> None:
    for dim in (-1, 1):
        refuses(op, 2, "f32[3]", dim=dim, reverse=False)


# Windows

WINDOW: dict[str, Any] = dict(
    kind="sum",
    window=(2,),
    strides=(1,),
    padding=((0, 0),),
    base_dilation=(1,),
    window_dilation=(1,),
)
POOL: dict[str, Any] = dict(window=(2,), strides=(2,), padding=((0, 0),))


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    rank = draw(st.integers(0, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    window, dilation = each(1, 3), each(1, 2)
    return each(0, 5), dict(
        kind=draw(st.sampled_from(("sum", "max", "min"))),
        window=window,
        strides=each(1, 3),
        padding=tuple(zip(each(0, 2), each(0, 2), strict=True)),
        base_dilation=each(1, 2),
        window_dilation=dilation,
    )


@given(windows(), st.sampled_from(("f32", "i32", "u8")))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_reduce_window_equals_lax(evaluate: Any, case: Any, dtype: str) -> None:
    shape, attrs = case
    x = few(dtype, shape)
    x = np.where(np.isfinite(x), x, 0).astype(x.dtype) if attrs["kind"] == "sum" else x
    (got,) = evaluate(reduce_window, x, **attrs)
    low, high = (-math.inf, math.inf)
    if DTYPES[dtype].is_integer:
        low, high = np.iinfo(x.dtype).min, np.iinfo(x.dtype).max
    start, function = {
        "sum": (0, jax.lax.add),
        "max": (low, jax.lax.max),
        "min": (high, jax.lax.min),
    }[attrs["kind"]]
    names = ("window", "strides", "padding", "base_dilation", "window_dilation")
    expected = jax.lax.reduce_window(
        x, np.array(start, x.dtype), function, *(attrs[name] for name in names)
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_reduce_window_of_narrow_floats_sums_in_f32(evaluate: Any, dtype: str) -> None:
    x = np.array([4096, 1, 1, 1, 1, -4096]).astype(DTYPES[dtype].numpy)
    (got,) = evaluate(reduce_window, x, **{**WINDOW, "window": (6,)})
    assert got.astype(float) == 4


def test_reduce_window_is_nan_where_any_is(evaluate: Any) -> None:
    x = np.float32([1, math.nan, 2, 3])
    for kind in ("max", "min", "sum"):
        (got,) = evaluate(reduce_window, x, **{**WINDOW, "kind": kind})
        np.testing.assert_array_equal(np.isnan(got), [True, True, False])


def test_reduce_window_crops_with_negative_padding(evaluate: Any) -> None:
    x = np.float32([1, 2, 4, 8])
    (got,) = evaluate(reduce_window, x, **{**WINDOW, "padding": ((-1, -1),)})
    np.testing.assert_array_equal(got, [6])
    (got,) = evaluate(reduce_window, x, **{**WINDOW, "padding": ((-3, -3),)})
    assert got.shape == (0,)


def test_reduce_window_c1_one_entry_for_each_dimension(refuses: Any) -> None:
    for name in ("window", "strides", "base_dilation", "window_dilation"):
        refuses(reduce_window, 1, "f32[4]", **{**WINDOW, name: (1, 1)})
    refuses(reduce_window, 1, "f32[4]", **{**WINDOW, "padding": ()})


def test_reduce_window_c2_positive(refuses: Any) -> None:
    for name in ("window", "strides", "base_dilation", "window_dilation"):
        refuses(reduce_window, 2, "f32[4]", **{**WINDOW, name: (0,)})


def test_reduce_window_c3_real_numbers(refuses: Any) -> None:
    for dtype in ("bool", "c64"):
        refuses(reduce_window, 3, f"{dtype}[4]", **WINDOW)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("window", "stride"), [(2, 2), (3, 2), (3, 1), (2, 3)])
def test_select_and_scatter_add_is_the_gradient_of_max_pooling(
    evaluate: Any, window: int, stride: int, padding: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (2, 1, 7, 6)).astype(np.float64)  # ties in most windows
    leaf = torch.from_numpy(x).requires_grad_()
    out = torch.nn.functional.max_pool2d(leaf, window, stride, padding)
    grad = rng.integers(1, 9, out.shape).astype(np.float64)
    out.backward(torch.from_numpy(grad))
    attrs = dict(
        window=(1, 1, window, window),
        strides=(1, 1, stride, stride),
        padding=((0, 0), (0, 0), (padding, padding), (padding, padding)),
    )
    (got,) = evaluate(select_and_scatter_add, grad, x, **attrs)
    np.testing.assert_array_equal(got, leaf.grad)
    (_, pull) = jax.vjp(
        lambda x: jax.lax.reduce_window(x, -np.inf, jax.lax.max, *attrs.values()),
        x.astype(np.float32),
    )
    np.testing.assert_array_equal(got, pull(grad.astype(np.float32))[0])


def test_select_and_scatter_add_chooses_the_first_nan_and_real_elements(evaluate: Any) -> None:
    x = np.float32([-math.inf, math.nan, 3, math.nan])
    attrs = {**POOL, "window": (4,), "strides": (4,)}
    (got,) = evaluate(select_and_scatter_add, np.float32([7]), x, **attrs)
    np.testing.assert_array_equal(got, [0, 7, 0, 0])
    attrs = {**POOL, "padding": ((1, 1),)}
    low = np.full(2, -math.inf, np.float32)
    (got,) = evaluate(select_and_scatter_add, np.float32([5, 6]), low, **attrs)
    np.testing.assert_array_equal(got, [5, 6])  # padding, though as large, is never chosen


def test_select_and_scatter_add_of_empty_arrays(evaluate: Any) -> None:
    (got,) = evaluate(select_and_scatter_add, np.zeros(0), np.zeros(1), **POOL)
    np.testing.assert_array_equal(got, [0])


def test_select_and_scatter_add_c1_one_entry_for_each_dimension(refuses: Any) -> None:
    for name in POOL:
        refuses(select_and_scatter_add, 1, "f32[2]", "f32[4]", **{**POOL, name: ()})


def test_select_and_scatter_add_c2_positive(refuses: Any) -> None:
    for name in ("window", "strides"):
        refuses(select_and_scatter_add, 2, "f32[2]", "f32[4]", **{**POOL, name: (0,)})


def test_select_and_scatter_add_c3_one_float_dtype(refuses: Any) -> None:
    refuses(select_and_scatter_add, 3, "f64[2]", "f32[4]", **POOL)
    refuses(select_and_scatter_add, 3, "i32[2]", "i32[4]", **POOL)


def test_select_and_scatter_add_c4_one_source_for_each_position(refuses: Any) -> None:
    refuses(select_and_scatter_add, 4, "f32[3]", "f32[4]", **POOL)


# Sorting


@pytest.mark.parametrize("dtype", [*REAL, "bool"])
@pytest.mark.parametrize("dim", [0, 1])
def test_sort_equals_lax_sort_in_every_dtype(evaluate: Any, dtype: str, dim: int) -> None:
    d = DTYPES[dtype]
    x = few(dtype, (6, 5), nan=True) if dtype != "bool" else few("u8", (6, 5)) > 1
    place = np.indices(x.shape)[dim]
    keys, order = evaluate(sort, x, place, dim=dim, num_keys=1)
    with jax.enable_x64(True):
        wide = x.astype(np.float32) if d.itemsize == 1 and d.kind == "float" else x
        expected = jax.lax.sort((wide, place), dimension=dim, is_stable=True, num_keys=1)[1]
    np.testing.assert_array_equal(order, expected)
    assert keys.tobytes() == np.take_along_axis(x, np.asarray(expected), dim).tobytes()


@given(st.integers(0, 7), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_sort_is_lexicographic_and_stable(evaluate: Any, n: int, num_keys: int, seed: int) -> None:
    keys = [few(dtype, n, seed + i) for i, dtype in enumerate(("i8", "f32", "u16"))]
    number = np.arange(n, dtype=np.int64)
    got = evaluate(sort, *keys, number, dim=0, num_keys=num_keys)
    rows = list(zip(*(k.tolist() for k in keys), range(n), strict=True))
    rows.sort(key=lambda row: row[:num_keys])  # Python's sort is stable
    np.testing.assert_array_equal(got[3], [row[3] for row in rows])
    for k, result in zip(keys, got, strict=False):
        assert result.tobytes() == k[got[3]].tobytes()


def test_sort_puts_nan_last_and_keeps_zeros_in_order(evaluate: Any) -> None:
    x = np.float32([math.nan, 0.0, -0.0, -math.nan, math.inf, -0.0, -1])
    keys, order = evaluate(sort, x, np.arange(7), dim=0, num_keys=1)
    np.testing.assert_array_equal(order, [6, 1, 2, 5, 4, 0, 3])
    np.testing.assert_array_equal(np.signbit(keys[1:4]), [False, True, True])


def test_sort_moves_complex_numbers_that_are_no_keys(evaluate: Any) -> None:
    _, z = evaluate(sort, np.int32([2, 1]), np.complex64([2j, 1j]), dim=0, num_keys=1)
    np.testing.assert_array_equal(z, [1j, 2j])


def test_sort_c1_operands_have_one_shape(refuses: Any) -> None:
    refuses(sort, 1, dim=0, num_keys=1)
    refuses(sort, 1, "f32[3]", "f32[4]", dim=0, num_keys=1)


def test_sort_c2_dim(refuses: Any) -> None:
    refuses(sort, 2, "f32[]", dim=0, num_keys=1)
    refuses(sort, 2, "f32[3]", dim=-1, num_keys=1)


def test_sort_c3_keys(refuses: Any) -> None:
    for num_keys in (0, 2):
        refuses(sort, 3, "f32[3]", dim=0, num_keys=num_keys)


def test_sort_c4_keys_are_ordered(refuses: Any) -> None:
    refuses(sort, 4, "c64[3]", dim=0, num_keys=1)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("k", [0, 1, 4, 9])
def test_top_k_is_descending_with_the_lower_index_first(evaluate: Any, dtype: str, k: int) -> None:
    x = few(dtype, (5, 9), nan=True)
    got, indices = evaluate(top_k, x, k=k)
    for row, picked, chosen in zip(plain(x).tolist(), plain(got).tolist(), indices, strict=True):
        order = sorted(
            range(9),
            key=lambda i: (0 if row[i] != row[i] else 1, -row[i] if row[i] == row[i] else 0, i),
        )
        assert chosen.tolist() == order[:k]
        np.testing.assert_array_equal(picked, [row[i] for i in order[:k]])


def test_top_k_of_the_least_integer(evaluate: Any) -> None:
    x = np.int8([-128, 127, -128, 0])
    np.testing.assert_array_equal(evaluate(top_k, x, k=4)[1], [1, 3, 0, 2])
    np.testing.assert_array_equal(evaluate(top_k, x.astype(np.uint8), k=4)[1], [0, 2, 1, 3])


@pytest.mark.parametrize("dtype", ["f32", "i32"])
def test_top_k_equals_lax(evaluate: Any, dtype: str) -> None:
    x = few(dtype, (3, 2, 8), nan=True)
    x = x + x.dtype.type(0)  # lax.top_k takes -0 for less than 0
    for got, expected in zip(evaluate(top_k, x, k=5), jax.lax.top_k(x, 5), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_top_k_c1_operand(refuses: Any) -> None:
    for x in ("f32[]", "bool[3]", "c64[3]"):
        refuses(top_k, 1, x, k=0)


def test_top_k_c2_k(refuses: Any) -> None:
    for k in (-1, 4):
        refuses(top_k, 2, "f32[3]", k=k)


def test_flops_count_the_operands() -> None:
    x = TensorType(DTYPES["f32"], (3, 4))
    y = x.with_shape((3,))
    assert reduce_sum.flops([x], {}, [y]) == 12
    assert argmax.flops([x], {}, [y]) == 12
    assert cumsum.flops([x], {}, [x]) == 12
    assert reduce_window.flops([x], {**WINDOW, "window": (2, 3)}, [x]) == 12 * 6
    ops = (*FAMILY, *WINDOWS)
    assert len({op.name for op in ops}) == len(ops)
