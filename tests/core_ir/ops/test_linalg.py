"""Matrix products, Cholesky factors and triangular systems against jax.lax and SciPy."""

from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.ops.linalg import cholesky, dot_general, grouped_matmul, triangular_solve
from plait.core_ir.types import DTYPES, TensorType, type_of

MATMUL: dict[str, Any] = dict(batch=((), ()), contract=((1,), (0,)))
SOLVE: dict[str, Any] = dict(
    left_side=True, lower=True, transpose_a=False, conjugate_a=False, unit_diagonal=False
)
FLAGS = tuple(SOLVE)


@st.composite
def products(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Shapes of a and b with batch, contracted and free dimensions in any order."""
    sizes = [draw(st.integers(0, 4)) for _ in range(draw(st.integers(0, 4)))]
    num_batch = draw(st.integers(0, len(sizes)))
    shapes, dims = [], []
    for _ in range(2):
        own = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(0, 2)))]
        order = draw(st.permutations(range(len(sizes) + len(own))))
        shape = [0] * len(order)
        for place, size in zip(order, sizes + own, strict=True):
            shape[place] = size
        shapes.append(tuple(shape))
        dims.append(order[: len(sizes)])
    batch = tuple(tuple(d[:num_batch]) for d in dims)
    contract = tuple(tuple(d[num_batch:]) for d in dims)
    return shapes[0], shapes[1], dict(batch=batch, contract=contract)


@given(products(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_dot_general_equals_lax_dot_general(evaluate: Any, case: Any, seed: int) -> None:
    shape_a, shape_b, attrs = case
    rng = np.random.default_rng(seed)
    a = rng.integers(-9, 9, shape_a).astype(np.int32)
    b = rng.integers(-9, 9, shape_b).astype(np.int32)
    (got,) = evaluate(dot_general, a, b, **attrs)
    dims = (attrs["contract"], attrs["batch"])
    np.testing.assert_array_equal(got, jax.lax.dot_general(a, b, dims))


@pytest.mark.parametrize("name", ["f64", "f32", "c64", "c128", "i8", "u16", "i64"])
def test_dot_general_computes_in_the_dtype_of_its_operands(evaluate: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    dtype = DTYPES[name].numpy
    a, b = (rng.integers(0, 100, shape).astype(dtype) for shape in ((3, 5), (5, 4)))
    (got,) = evaluate(dot_general, a, b, **MATMUL)
    exact = a.astype(object) @ b.astype(object)
    if dtype.kind in "iu":  # integers wrap
        bits = 8 * dtype.itemsize
        exact = np.vectorize(lambda n: np.array(int(n) % 2**bits, np.uint64).astype(dtype))(exact)
    np.testing.assert_array_equal(got, exact.astype(dtype))


@pytest.mark.parametrize("name", ["f16", "bf16", "f8e4m3fn", "f8e5m2"])
def test_dot_general_of_narrow_floats_is_summed_in_f32_and_rounded_once(
    evaluate: Any, name: str
) -> None:
    dtype = DTYPES[name].numpy
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(dtype) for shape in ((4, 200), (200, 3)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    (got,) = evaluate(dot_general, a, b, **MATMUL)
    step = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=0.51 * step, atol=1e-4)
    (in_f32,) = evaluate(dot_general, a, b, **MATMUL, dtype=DTYPES["f32"])
    np.testing.assert_allclose(in_f32, exact, rtol=1e-5, atol=1e-5)


def test_dot_general_result_dtype_is_the_one_it_is_computed_in(evaluate: Any) -> None:
    a = np.full((1, 4), 100, np.int8)
    (got,) = evaluate(dot_general, a, a.T, **MATMUL, dtype=DTYPES["i32"])
    assert got.item() == 40_000
    tiny = np.float32([[1, 1e-9]])
    (wide,) = evaluate(
        dot_general, tiny, np.ones((2, 1), np.float32), **MATMUL, dtype=DTYPES["f64"]
    )
    assert wide.item() == 1 + float(np.float32(1e-9))


def test_dot_general_keeps_nan_and_infinity(evaluate: Any) -> None:
    a = np.float32([[np.inf, 0], [np.nan, 0], [np.inf, 1]])
    b = np.float32([[1], [-np.inf]])
    (got,) = evaluate(dot_general, a, b, **MATMUL)
    np.testing.assert_array_equal(got, np.full((3, 1), np.nan, np.float32))


def test_dot_general_c1_operands_have_one_dtype(refuses: Any) -> None:
    refuses(dot_general, 1, "f32[2, 3]", "f64[3, 2]", **MATMUL)
    refuses(dot_general, 1, "bool[2, 3]", "bool[3, 2]", **MATMUL)


def test_dot_general_c2_dims_come_in_pairs(refuses: Any) -> None:
    refuses(dot_general, 2, "f32[2, 3]", "f32[3, 2]", batch=((),), contract=((1,), (0,)))
    refuses(dot_general, 2, "f32[2, 3]", "f32[3, 2]", batch=((0,), ()), contract=((1,), (0,)))
    refuses(dot_general, 2, "f32[2, 3]", "f32[3, 2]", batch=((), ()), contract=((1, 0), (0,)))


def test_dot_general_c3_dims_are_in_range_and_none_twice(refuses: Any) -> None:
    refuses(dot_general, 3, "f32[2, 3]", "f32[3, 2]", batch=((), ()), contract=((2,), (0,)))
    refuses(dot_general, 3, "f32[2, 3]", "f32[3, 2]", batch=((), ()), contract=((1,), (-2,)))
    refuses(dot_general, 3, "f32[3, 3]", "f32[3, 3]", batch=((1,), (1,)), contract=((1,), (0,)))


def test_dot_general_c4_paired_dims_have_equal_sizes(refuses: Any) -> None:
    refuses(dot_general, 4, "f32[2, 3]", "f32[4, 2]", **MATMUL)
    refuses(dot_general, 4, "f32[2, 3]", "f32[3, 3]", batch=((0,), (0,)), contract=((), ()))


def test_dot_general_c5_the_result_is_no_narrower(refuses: Any, accepts: Any) -> None:
    refuses(dot_general, 5, "f32[2, 3]", "f32[3, 2]", **MATMUL, dtype=DTYPES["bf16"])
    refuses(dot_general, 5, "i8[2, 3]", "i8[3, 2]", **MATMUL, dtype=DTYPES["f32"])
    refuses(dot_general, 5, "i8[2, 3]", "i8[3, 2]", **MATMUL, dtype=DTYPES["u32"])
    (result,) = accepts(dot_general, "bf16[2, 3]", "bf16[3, 2]", **MATMUL, dtype=DTYPES["f32"])
    assert str(result) == "f32[2, 2]"


def test_dot_general_flops_count_a_multiply_add_as_two() -> None:
    attrs: dict[str, Any] = dict(batch=((0,), (1,)), contract=((2,), (0,)))
    types = [TensorType(DTYPES["f32"], shape) for shape in ((5, 3, 2), (2, 5, 7))]
    assert dot_general.flops(types, attrs, dot_general.types(types, attrs)) == 2 * 5 * 3 * 7 * 2


@pytest.mark.parametrize("sizes", [(2, 0, 3), (5, 0, 0), (0, 0, 0), (1, 2, 3), (7, 0, 0)])
@pytest.mark.parametrize("name", ["f32", "bf16", "f16"])
def test_grouped_matmul_equals_ragged_dot(evaluate: Any, sizes: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(DTYPES[name].numpy) for s in ((7, 4), (3, 4, 2)))
    groups = np.int32(sizes)
    (got,) = evaluate(grouped_matmul, x, w, groups)
    expected = jax.lax.ragged_dot(x.astype(np.float32), w.astype(np.float32), groups)
    tolerance = {"f32": 1e-6, "bf16": 4e-3, "f16": 5e-4}[name]
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=tolerance, atol=tolerance)


def test_grouped_matmul_c1_ranks(refuses: Any) -> None:
    refuses(grouped_matmul, 1, "f32[7]", "f32[3, 4, 2]", "i32[3]")
    refuses(grouped_matmul, 1, "f32[7, 4]", "f32[4, 2]", "i32[4]")


def test_grouped_matmul_c2_one_dtype(refuses: Any) -> None:
    refuses(grouped_matmul, 2, "f32[7, 4]", "bf16[3, 4, 2]", "i32[3]")


def test_grouped_matmul_c3_equal_depth(refuses: Any) -> None:
    refuses(grouped_matmul, 3, "f32[7, 4]", "f32[3, 5, 2]", "i32[3]")


def test_grouped_matmul_c4_one_size_for_each_group(refuses: Any) -> None:
    refuses(grouped_matmul, 4, "f32[7, 4]", "f32[3, 4, 2]", "i32[4]")
    refuses(grouped_matmul, 4, "f32[7, 4]", "f32[3, 4, 2]", "i64[3]")


def test_grouped_matmul_c5_rows_beyond_the_sum_are_0(evaluate: Any) -> None:
    x, w = np.ones((5, 1), np.float32), np.float32([[[1]], [[2]]])
    (got,) = evaluate(grouped_matmul, x, w, np.int32([2, 1]))
    np.testing.assert_array_equal(got[:, 0], [1, 1, 2, 0, 0])
    (got,) = evaluate(grouped_matmul, x, w, np.int32([-3, 9]))
    np.testing.assert_array_equal(got[:, 0], [2, 2, 2, 2, 2])
    assert grouped_matmul.flops([type_of(x), type_of(w)], {}, []) == 2 * 5


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("name", ["f32", "f64", "c64", "c128"])
def test_cholesky_equals_scipy(evaluate: Any, lower: bool, name: str) -> None:
    x = positive_definite(DTYPES[name].numpy, 2, 4)
    (got,) = evaluate(cholesky, x, lower=lower)
    tolerance = 1e-5 if name in ("f32", "c64") else 1e-13
    for matrix, factor in zip(x, got, strict=True):
        expected = scipy.linalg.cholesky(matrix, lower=lower)
        np.testing.assert_allclose(factor, expected, rtol=tolerance, atol=tolerance)


def positive_definite(dtype: Any, *batch_and_size: int) -> np.ndarray:
    *batch, n = batch_and_size
    rng = np.random.default_rng(3)
    root = rng.normal(size=(*batch, n, n))
    if np.dtype(dtype).kind == "c":
        root = root + 1j * rng.normal(size=root.shape)
    return (root @ np.conj(np.swapaxes(root, -1, -2)) + np.eye(n)).astype(dtype)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (1, 1)])
def test_cholesky_of_small_and_empty_matrices(evaluate: Any, shape: Any) -> None:
    (got,) = evaluate(cholesky, np.full(shape, 4, np.float32), lower=True)
    assert got.shape == shape
    assert (got == 2).all()


def test_cholesky_c1_dtype(refuses: Any) -> None:
    refuses(cholesky, 1, "bf16[3, 3]", lower=True)
    refuses(cholesky, 1, "i32[3, 3]", lower=True)


def test_cholesky_c2_square(refuses: Any) -> None:
    refuses(cholesky, 2, "f32[3, 4]", lower=True)
    refuses(cholesky, 2, "f32[3]", lower=True)


@pytest.mark.parametrize("lower", [True, False])
def test_cholesky_c3_one_triangle_is_read(evaluate: Any, lower: bool) -> None:
    x = positive_definite(np.complex128, 4)
    other = np.triu(np.full_like(x, np.nan), 1)
    spoilt = x + (other if lower else other.T)
    (got,), (expected,) = (evaluate(cholesky, y, lower=lower) for y in (spoilt, x))
    np.testing.assert_array_equal(got, expected)


def test_cholesky_c4_no_factor_is_nan(evaluate: Any) -> None:
    x = np.stack([np.eye(2), -np.eye(2), np.eye(2)])
    (got,) = evaluate(cholesky, x, lower=True)
    np.testing.assert_array_equal(got[[0, 2]], x[[0, 2]])
    np.testing.assert_array_equal(got[1], [[np.nan, 0], [np.nan, np.nan]])
    np.testing.assert_array_equal(got, jax.lax.linalg.cholesky(x.astype(np.float32)))


@pytest.mark.parametrize("flags", tuple(product([False, True], repeat=5)))
def test_triangular_solve_equals_jax(evaluate: Any, flags: tuple[bool, ...]) -> None:
    attrs = dict(zip(FLAGS, flags, strict=True))
    rng = np.random.default_rng(5)

    def complex_(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)

    a = complex_(2, 3, 3) + 3 * np.eye(3, dtype=np.complex64)
    b = complex_(2, 3, 4) if attrs["left_side"] else complex_(2, 4, 3)
    (got,) = evaluate(triangular_solve, a, b, **attrs)
    expected = jax.lax.linalg.triangular_solve(a, b, **attrs)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0)])
def test_triangular_solve_of_empty_operands(evaluate: Any, shape: tuple[int, ...]) -> None:
    a = np.ones((shape[0], 3, 3), np.float32)
    (got,) = evaluate(triangular_solve, a, np.ones(shape, np.float32), **SOLVE)
    assert got.shape == shape


def test_triangular_solve_of_a_singular_matrix_is_not_finite(evaluate: Any) -> None:
    a, b = np.float32([[0, 0], [1, 1]]), np.float32([[1], [1]])
    (got,) = evaluate(triangular_solve, a, b, **SOLVE)
    np.testing.assert_array_equal(got, np.float32([[np.inf], [-np.inf]]))


def test_triangular_solve_c1_dtype(refuses: Any) -> None:
    refuses(triangular_solve, 1, "f16[3, 3]", "f16[3, 1]", **SOLVE)
    refuses(triangular_solve, 1, "f32[3, 3]", "f64[3, 1]", **SOLVE)


def test_triangular_solve_c2_a_is_square(refuses: Any) -> None:
    refuses(triangular_solve, 2, "f32[3, 4]", "f32[3, 1]", **SOLVE)


def test_triangular_solve_c3_batch(refuses: Any) -> None:
    refuses(triangular_solve, 3, "f32[2, 3, 3]", "f32[3, 1]", **SOLVE)
    refuses(triangular_solve, 3, "f32[2, 3, 3]", "f32[1, 3, 1]", **SOLVE)


def test_triangular_solve_c4_b_fits_a(refuses: Any) -> None:
    refuses(triangular_solve, 4, "f32[3, 3]", "f32[4, 3]", **SOLVE)
    refuses(triangular_solve, 4, "f32[3, 3]", "f32[3, 4]", **{**SOLVE, "left_side": False})


@pytest.mark.parametrize(("lower", "unit_diagonal"), tuple(product([True, False], repeat=2)))
def test_triangular_solve_c5_one_triangle_is_read(
    evaluate: Any, lower: bool, unit_diagonal: bool
) -> None:
    attrs = {**SOLVE, "lower": lower, "unit_diagonal": unit_diagonal}
    rng = np.random.default_rng(6)
    a, b = rng.normal(size=(3, 3)) + 2 * np.eye(3), rng.normal(size=(3, 2))
    read = np.tril(np.ones((3, 3), bool), -1 if unit_diagonal else 0)
    read = read if lower else read.T
    (got,) = evaluate(triangular_solve, np.where(read, a, np.nan), b, **attrs)
    triangle = np.where(read, a, np.eye(3) if unit_diagonal else 0)
    np.testing.assert_allclose(triangle @ got, b, rtol=1e-12)
