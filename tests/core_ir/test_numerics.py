"""The measure of closeness, against numbers worked out by hand."""

import math

import ml_dtypes
import numpy as np
import pytest

from plait.core_ir.errors import UsageError
from plait.core_ir.numerics import (
    TOLERANCES,
    gradient_error,
    gradient_errors,
    relative_error,
    tolerance,
)


def f32(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def test_error_is_relative_to_the_largest_entry_of_the_same_gradient() -> None:
    # |4.5 - 4| = 0.5 is the largest difference, 8 the largest entry.
    assert gradient_error({"a": f32(1, 4.5, -8)}, {"a": f32(1, 4, -8)}) == 0.5 / 8


def test_a_small_gradient_is_measured_by_a_thousandth_of_the_largest() -> None:
    reference = {"big": f32(100.0), "zero": f32(0.0)}
    errors = gradient_errors({"big": f32(101.0), "zero": f32(0.25)}, reference)
    assert errors == {"big": 0.01, "zero": 0.25 / (1e-3 * 100)}
    assert gradient_error({"big": f32(101.0), "zero": f32(0.25)}, reference) == errors["zero"]


def test_difference_is_taken_in_more_precision_than_the_dtype_has() -> None:
    one, next_one = np.array([1], ml_dtypes.bfloat16), np.array([1 + 2**-7], ml_dtypes.bfloat16)
    assert gradient_error({"a": next_one}, {"a": one}) == 2**-7


def test_complex_gradients_are_measured_by_magnitude() -> None:
    assert gradient_error({"a": np.array([3 + 5j])}, {"a": np.array([3 + 4j])}) == 1 / 5


def test_integers_do_not_wrap() -> None:
    assert relative_error(np.array([0], np.uint8), np.array([1], np.uint8)) == 1.0


def test_equal_gradients_have_no_error_even_when_all_are_zero_or_empty() -> None:
    same = {"zero": f32(0, 0), "empty": np.zeros((0, 3), np.float32)}
    assert gradient_error(same, same) == 0.0
    assert gradient_error({}, {}) == 0.0


def test_any_difference_from_a_zero_reference_is_infinite() -> None:
    assert gradient_error({"a": f32(1e-30)}, {"a": f32(0)}) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_on_one_side_is_an_infinite_error(bad: float) -> None:
    good, spoilt = {"a": f32(1, 2), "b": f32(3)}, {"a": f32(1, bad), "b": f32(3)}
    assert gradient_error(spoilt, good) == math.inf
    assert gradient_error(good, spoilt) == math.inf
    assert gradient_error(spoilt, spoilt) == 0.0


def test_infinities_of_opposite_sign_differ() -> None:
    assert gradient_error({"a": f32(math.inf)}, {"a": f32(-math.inf)}) == math.inf


def test_names_that_differ_are_an_error_that_lists_them() -> None:
    with pytest.raises(UsageError, match=r"missing \['b'\], extra \['c'\]"):
        gradient_error({"a": f32(1), "c": f32(1)}, {"a": f32(1), "b": f32(1)})


def test_a_part_of_the_gradients_is_measured_by_the_scales_of_all() -> None:
    reference = {"big": f32(100.0), "small": f32(0.0)}
    assert gradient_errors({"small": f32(0.25)}, reference, partial=True) == {"small": 2.5}
    with pytest.raises(UsageError, match=r"extra \['other'\]"):
        gradient_errors({"other": f32(1)}, reference, partial=True)


def test_shapes_that_differ_are_an_error_even_where_they_broadcast() -> None:
    with pytest.raises(UsageError, match=r"'a' has shape \[1\], the reference \[2\]"):
        gradient_error({"a": f32(1)}, {"a": f32(1, 1)})


def test_relative_error_of_losses() -> None:
    assert relative_error(5.5, 5.0) == pytest.approx(0.1)
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) == math.inf
    assert relative_error(math.nan, 1.0) == math.inf


def test_tolerances_are_those_of_the_contract() -> None:
    assert tolerance("f32", "framework").loss == 1e-6
    assert tolerance("f32", "framework").grads == 1e-5
    assert tolerance("f32", "backends").loss == 1e-5
    assert tolerance("f32", "backends").grads == 1e-4
    assert {t.grads for (_, dtype), t in TOLERANCES.items() if dtype == "bf16"} == {2e-2}
    assert {t.grads for (_, dtype), t in TOLERANCES.items() if dtype == "f64"} == {1e-10}


def test_a_dtype_without_tolerance_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match="'f8e5m2'; there are: f64, f32, bf16"):
        tolerance("f8e5m2", "framework")
