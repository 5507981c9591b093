"""Ops that move data, against jax.lax and NumPy's indexing."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.op import Literal
from plait.core_ir.ops.shape import (
    FAMILY,
    broadcast,
    concatenate,
    constant,
    dynamic_slice,
    dynamic_update_slice,
    iota,
    pad,
    reshape,
    reverse,
    slice_,
    transpose,
)
from plait.core_ir.types import DTYPES, TensorType

NAMES = list(DTYPES)
GRID = np.arange(24).reshape(2, 3, 4)


def same(got: np.ndarray, expected: Any) -> None:
    """Equal types and bits."""
    expected = np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


def grid(dtype: str) -> np.ndarray:
    return (GRID % 7).astype(DTYPES[dtype].numpy)


def test_all_are_movement_and_free() -> None:
    x = TensorType(DTYPES["f32"], (2,))
    for op in FAMILY:
        assert op.movement
        assert op.flops([x], {}, [x]) == 0


@pytest.mark.parametrize("dtype", NAMES)
def test_every_dtype_is_moved_bit_for_bit(evaluate: Any, dtype: str) -> None:
    x = grid(dtype)
    start = [np.int32(n) for n in (1, 0, 2)]
    same(evaluate(constant, value=Literal(x))[0], x)
    same(evaluate(reshape, x, shape=(4, 6))[0], x.reshape(4, 6))
    same(evaluate(transpose, x, permutation=(2, 0, 1))[0], x.transpose(2, 0, 1))
    same(evaluate(broadcast, x[0, 0], shape=(4, 2), dims=(0,))[0], np.stack([x[0, 0]] * 2, 1))
    attrs = dict(start=(0, 1, 0), limit=(2, 3, 4), strides=(1, 1, 3))
    same(evaluate(slice_, x, **attrs)[0], x[:, 1:3, ::3])
    same(evaluate(concatenate, x, x[:, :1], dim=1)[0], x[:, [0, 1, 2, 0]])
    same(evaluate(reverse, x, dims=(0, 2))[0], x[::-1, :, ::-1])
    same(evaluate(dynamic_slice, x, *start, sizes=(1, 3, 2))[0], x[1:, :, 2:])
    (got,) = evaluate(dynamic_update_slice, x, x[:1, :, :2], *start)
    expected = x.copy()
    expected[1:, :, 2:] = x[:1, :, :2]
    same(got, expected)
    (got,) = evaluate(pad, x, x[0, 0, 1], low=(0, 1, -1), high=(0, 0, 0), interior=(1, 0, 0))
    expected = np.full((3, 4, 3), x[0, 0, 1])
    expected[::2, 1:] = x[:, :, 1:]
    same(got, expected)


@pytest.mark.parametrize("dtype", [n for n in NAMES if n != "bool"])
def test_iota_counts_along_its_dim(evaluate: Any, dtype: str) -> None:
    (got,) = evaluate(iota, dtype=DTYPES[dtype], shape=(2, 5, 3), dim=1)
    same(got, np.tile(np.arange(5)[:, None], (2, 1, 3)).astype(DTYPES[dtype].numpy))
    same(evaluate(iota, dtype=DTYPES[dtype], shape=(0,), dim=0)[0], np.zeros(0, got.dtype))


def test_scalars_and_empty_arrays(evaluate: Any) -> None:
    same(evaluate(reshape, np.float32(3), shape=(1, 1))[0], np.float32([[3]]))
    same(evaluate(reshape, np.zeros((0, 3), bool), shape=(7, 0))[0], np.zeros((7, 0), bool))
    same(evaluate(transpose, np.float32(3), permutation=())[0], np.float32(3))
    same(evaluate(broadcast, np.float32(3), shape=(2, 0), dims=())[0], np.zeros((2, 0), np.float32))
    same(evaluate(broadcast, np.float32(3), shape=(), dims=())[0], np.float32(3))
    same(evaluate(slice_, np.float32(3), start=(), limit=(), strides=())[0], np.float32(3))
    same(evaluate(reverse, np.zeros((0, 2)), dims=(0,))[0], np.zeros((0, 2)))
    same(evaluate(concatenate, np.ones((0, 2)), np.ones((1, 2)), dim=0)[0], np.ones((1, 2)))
    same(evaluate(dynamic_slice, np.float32(3), sizes=())[0], np.float32(3))
    same(evaluate(dynamic_update_slice, np.float32(3), np.float32(4))[0], np.float32(4))
    (got,) = evaluate(pad, np.ones((0, 1)), np.float64(7), low=(1, 0), high=(1, 0), interior=(3, 2))
    same(got, np.full((2, 1), 7.0))


@st.composite
def paddings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    config = []
    for n in shape:
        interior = draw(st.integers(0, 2))
        spread = n + max(n - 1, 0) * interior
        low = draw(st.integers(-5, 4))
        high = draw(st.integers(max(-5, -spread - low), max(4, -spread - low)))
        config.append((low, high, interior))
    return shape, config


@given(paddings())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_pad_equals_lax_pad(evaluate: Any, case: Any) -> None:
    shape, config = case
    x = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    low, high, interior = (tuple(c[i] for c in config) for i in range(3))
    (got,) = evaluate(pad, x, np.float32(-1), low=low, high=high, interior=interior)
    np.testing.assert_array_equal(got, jax.lax.pad(x, np.float32(-1), config))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_broadcast_equals_lax(evaluate: Any, dims: list[tuple[int, bool]]) -> None:
    shape = tuple(size for size, _ in dims)
    kept = tuple(d for d, (_, keep) in enumerate(dims) if keep)
    x = np.random.default_rng(0).normal(size=[shape[d] if d % 2 else 1 for d in kept])
    (got,) = evaluate(broadcast, x.astype(np.float32), shape=shape, dims=kept)
    np.testing.assert_array_equal(got, jax.lax.broadcast_in_dim(x.astype(np.float32), shape, kept))


def test_iota_c1_dim(refuses: Any) -> None:
    for dim in (-1, 2):
        refuses(iota, 1, dtype=DTYPES["i32"], shape=(2, 3), dim=dim)


def test_iota_c2_numbers(refuses: Any) -> None:
    refuses(iota, 2, dtype=DTYPES["bool"], shape=(2, 3), dim=0)


def test_reshape_c1_number_of_elements(refuses: Any) -> None:
    refuses(reshape, 1, "f32[2, 3]", shape=(5,))
    refuses(reshape, 1, "f32[0, 3]", shape=())


@pytest.mark.parametrize("permutation", [(0,), (0, 0), (0, 2), (-1, 0), (0, 1, 2)])
def test_transpose_c1_permutation(refuses: Any, permutation: tuple[int, ...]) -> None:
    refuses(transpose, 1, "f32[2, 3]", permutation=permutation)


@pytest.mark.parametrize("dims", [(), (1, 0), (0, 0), (0, 3), (-1, 0)])
def test_broadcast_c1_dims_increase(refuses: Any, dims: tuple[int, ...]) -> None:
    refuses(broadcast, 1, "f32[2, 2]", shape=(2, 2, 2), dims=dims)


def test_broadcast_c2_sizes_fit(refuses: Any) -> None:
    refuses(broadcast, 2, "f32[2]", shape=(3,), dims=(0,))
    refuses(broadcast, 2, "f32[0]", shape=(1,), dims=(0,))


def test_slice_c1_one_entry_for_each_dimension(refuses: Any) -> None:
    refuses(slice_, 1, "f32[4, 4]", start=(0,), limit=(4, 4), strides=(1, 1))


@pytest.mark.parametrize(("start", "limit"), [(-1, 2), (3, 2), (0, 5)])
def test_slice_c2_range(refuses: Any, start: int, limit: int) -> None:
    refuses(slice_, 2, "f32[4]", start=(start,), limit=(limit,), strides=(1,))


def test_slice_c3_strides(refuses: Any) -> None:
    refuses(slice_, 3, "f32[4]", start=(0,), limit=(4,), strides=(0,))


def test_slice_counts_the_elements_below_the_limit(evaluate: Any) -> None:
    x = np.arange(7)
    for start in range(8):
        for limit in range(start, 8):
            for stride in (1, 2, 3, 9):
                attrs = dict(start=(start,), limit=(limit,), strides=(stride,))
                same(evaluate(slice_, x, **attrs)[0], x[start:limit:stride])


def test_pad_c1_value_is_a_scalar_of_the_dtype(refuses: Any) -> None:
    for value in ("f64[]", "f32[1]"):
        refuses(pad, 1, "f32[2]", value, low=(0,), high=(0,), interior=(0,))


def test_pad_c2_one_entry_for_each_dimension(refuses: Any) -> None:
    refuses(pad, 2, "f32[2]", "f32[]", low=(0, 0), high=(0,), interior=(0,))


def test_pad_c3_interior(refuses: Any) -> None:
    refuses(pad, 3, "f32[2]", "f32[]", low=(0,), high=(0,), interior=(-1,))


def test_pad_c4_no_negative_size(refuses: Any) -> None:
    refuses(pad, 4, "f32[2]", "f32[]", low=(-2,), high=(-1,), interior=(0,))


def test_concatenate_c1_operands(refuses: Any) -> None:
    refuses(concatenate, 1, dim=0)


def test_concatenate_c2_dim(refuses: Any) -> None:
    refuses(concatenate, 2, "f32[2]", "f32[2]", dim=1)
    refuses(concatenate, 2, "f32[]", dim=0)


def test_concatenate_c3_other_sizes_agree(refuses: Any) -> None:
    for other in ("f64[2, 3]", "f32[2, 4]", "f32[2]", "f32[2, 3, 1]"):
        refuses(concatenate, 3, "f32[2, 3]", other, dim=0)


@pytest.mark.parametrize("dims", [(2,), (-1,), (0, 0)])
def test_reverse_c1_dims(refuses: Any, dims: tuple[int, ...]) -> None:
    refuses(reverse, 1, "f32[2, 3]", dims=dims)


@pytest.mark.parametrize("integer", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("start", "clamped"), [(-(2**31), 0), (-1, 0), (2, 2), (4, 3), (2**31 - 1, 3)]
)
def test_dynamic_slices_clamp_their_starts(
    evaluate: Any, integer: Any, start: int, clamped: int
) -> None:
    x = np.arange(5)
    (got,) = evaluate(dynamic_slice, x, integer(start), sizes=(2,))
    same(got, x[clamped : clamped + 2])
    (got,) = evaluate(dynamic_update_slice, x, np.array([-1, -2]), integer(start))
    expected = x.copy()
    expected[clamped : clamped + 2] = [-1, -2]
    same(got, expected)


def test_dynamic_slice_c1_operand(refuses: Any) -> None:
    refuses(dynamic_slice, 1, sizes=())


def test_dynamic_slice_c2_starts(refuses: Any) -> None:
    refuses(dynamic_slice, 2, "f32[4, 4]", "i32[]", sizes=(1, 1))


def test_dynamic_slice_c3_starts_are_integer_scalars(refuses: Any) -> None:
    for start in ("u32[]", "f32[]", "i32[1]"):
        refuses(dynamic_slice, 3, "f32[4]", start, sizes=(1,))


def test_dynamic_slice_c4_sizes(refuses: Any) -> None:
    for sizes in ((5,), (-1,), (), (1, 1)):
        refuses(dynamic_slice, 4, "f32[4]", "i32[]", sizes=sizes)


def test_dynamic_update_slice_c1_operands(refuses: Any) -> None:
    refuses(dynamic_update_slice, 1, "f32[4]")


def test_dynamic_update_slice_c2_starts(refuses: Any) -> None:
    refuses(dynamic_update_slice, 2, "f32[4]", "f32[2]")


def test_dynamic_update_slice_c3_starts_are_integer_scalars(refuses: Any) -> None:
    refuses(dynamic_update_slice, 3, "f32[4]", "f32[2]", "u64[]")


def test_dynamic_update_slice_c4_update(refuses: Any) -> None:
    for update in ("f64[2]", "f32[5]", "f32[]", "f32[1, 2]"):
        refuses(dynamic_update_slice, 4, "f32[4]", update, "i32[]")
