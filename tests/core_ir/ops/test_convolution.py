"""Convolution and its gradients against jax.lax and torch."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.ops.convolution import (
    convolution,
    convolution_input_grad,
    convolution_weight_grad,
)
from plait.core_ir.types import DTYPES, TensorType

PLAIN: dict[str, Any] = dict(
    strides=(1,), padding=((0, 0),), lhs_dilation=(1,), rhs_dilation=(1,), groups=1
)
GRADIENT: dict[str, Any] = dict(strides=(1,), padding=((0, 0),), rhs_dilation=(1,), groups=1)
INPUT_GRAD = {**GRADIENT, "input_spatial": (5,)}
WEIGHT_GRAD = {**GRADIENT, "kernel_spatial": (3,)}


def by_jax(x: Any, w: Any, attrs: dict[str, Any]) -> Any:
    num_spatial = x.ndim - 2
    spatial = "DHW"[-num_spatial:]
    return jax.lax.conv_general_dilated(
        x,
        w,
        attrs["strides"],
        attrs["padding"],
        attrs.get("lhs_dilation", (1,) * num_spatial),
        attrs["rhs_dilation"],
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=attrs["groups"],
        batch_group_count=attrs.get("batch_groups", 1),
    )


def whole_numbers(rng: np.random.Generator, shape: Any, dtype: Any = np.float32) -> np.ndarray:
    """Small whole numbers: their sums are exact in any order."""
    return rng.integers(-4, 5, shape).astype(dtype)


@st.composite
def convolutions(draw: st.DrawFn, lhs: bool = True) -> tuple[Any, Any, dict[str, Any]]:
    num_spatial = draw(st.integers(1, 3))
    groups, batch_groups = draw(st.sampled_from(((1, 1), (2, 1), (3, 1), (1, 2), (1, 3))))
    if not lhs:
        batch_groups = 1

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(num_spatial))

    x = (batch_groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), *each(1, 6))
    per_group = draw(st.integers(1, 2))
    w = (groups * batch_groups * per_group, x[1] // groups, *each(1, 3))
    attrs: dict[str, Any] = dict(
        strides=each(1, 3),
        padding=tuple(zip(each(-1, 2), each(-1, 2), strict=True)),
        rhs_dilation=each(1, 2),
        groups=groups,
    )
    if lhs:
        attrs |= dict(lhs_dilation=each(1, 3), batch_groups=batch_groups)
    return x, w, attrs


@given(convolutions(), st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_convolution_equals_jax(evaluate: Any, case: Any, seed: int) -> None:
    shape_x, shape_w, attrs = case
    rng = np.random.default_rng(seed)
    x, w = whole_numbers(rng, shape_x), whole_numbers(rng, shape_w)
    (got,) = evaluate(convolution, x, w, **attrs)
    np.testing.assert_array_equal(got, by_jax(x, w, attrs))


@given(convolutions(lhs=False), st.integers(0, 1000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_gradients_equal_the_transposes_by_jax(evaluate: Any, case: Any, seed: int) -> None:
    shape_x, shape_w, attrs = case
    rng = np.random.default_rng(seed)
    x, w = whole_numbers(rng, shape_x), whole_numbers(rng, shape_w)
    out, pull = jax.vjp(lambda x, w: by_jax(x, w, attrs), x, w)
    grad = whole_numbers(rng, out.shape)
    expected_x, expected_w = pull(grad)
    (got_x,) = evaluate(convolution_input_grad, grad, w, input_spatial=shape_x[2:], **attrs)
    (got_w,) = evaluate(convolution_weight_grad, x, grad, kernel_spatial=shape_w[2:], **attrs)
    np.testing.assert_array_equal(got_x, expected_x)
    np.testing.assert_array_equal(got_w, expected_w)


@pytest.mark.parametrize("num_spatial", [1, 2, 3])
@pytest.mark.parametrize(("groups", "stride", "dilation"), [(1, 1, 1), (2, 2, 1), (4, 1, 2)])
def test_all_three_equal_torch(
    evaluate: Any, num_spatial: int, groups: int, stride: int, dilation: int
) -> None:
    rng = np.random.default_rng(num_spatial)
    x = rng.normal(size=(2, 4, 7, 6, 5)[: num_spatial + 2])
    w = rng.normal(size=(8, 4 // groups, 3, 2, 3)[: num_spatial + 2])
    attrs: dict[str, Any] = dict(
        strides=(stride,) * num_spatial,
        padding=((1, 1),) * num_spatial,
        rhs_dilation=(dilation,) * num_spatial,
        groups=groups,
    )
    forward = getattr(torch.nn.functional, f"conv{num_spatial}d")
    tx, tw = (torch.from_numpy(y).requires_grad_() for y in (x, w))
    out = forward(tx, tw, None, stride, 1, dilation, groups)
    grad = rng.normal(size=out.shape)
    out.backward(torch.from_numpy(grad))
    (got,) = evaluate(convolution, x, w, lhs_dilation=(1,) * num_spatial, **attrs)
    np.testing.assert_allclose(got, out.detach(), rtol=1e-12, atol=1e-12)
    (got,) = evaluate(convolution_input_grad, grad, w, input_spatial=x.shape[2:], **attrs)
    np.testing.assert_allclose(got, tx.grad, rtol=1e-12, atol=1e-12)
    (got,) = evaluate(convolution_weight_grad, x, grad, kernel_spatial=w.shape[2:], **attrs)
    np.testing.assert_allclose(got, tw.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["f16", "bf16", "i32", "i8", "c64"])
def test_convolution_in_other_dtypes(evaluate: Any, name: str) -> None:
    rng = np.random.default_rng(0)
    x, w = (whole_numbers(rng, s, DTYPES[name].numpy) for s in ((2, 4, 6), (3, 4, 2)))
    (got,) = evaluate(convolution, x, w, **PLAIN)
    expected = by_jax(x.astype(np.complex64), w.astype(np.complex64), PLAIN)
    np.testing.assert_array_equal(got.astype(np.complex64), expected)


def test_narrow_floats_are_summed_in_f32(evaluate: Any) -> None:
    x = np.full((1, 1, 300), 1, DTYPES["bf16"].numpy)
    w = np.full((1, 1, 300), 1, DTYPES["bf16"].numpy)
    (got,) = evaluate(convolution, x, w, **PLAIN)
    assert got.item() == 300  # one by one, bf16 stays at 256
    (got,) = evaluate(convolution_weight_grad, x, x, **{**GRADIENT, "kernel_spatial": (1,)})
    assert got.item() == 300
    grad = np.ones((1, 1, 300), x.dtype)
    padded = {**GRADIENT, "padding": ((299, 0),)}
    (got,) = evaluate(convolution_input_grad, grad, w, input_spatial=(300,), **padded)
    assert got[0, 0, 0] == 300


@pytest.mark.parametrize(
    ("x", "w", "result"),
    [
        ((0, 2, 5), (3, 2, 3), (0, 3, 3)),
        ((2, 0, 5), (3, 0, 3), (2, 3, 3)),
        ((2, 2, 5), (0, 2, 3), (2, 0, 3)),
        ((2, 2, 0), (3, 2, 3), (2, 3, 0)),
        ((2, 2, 2), (3, 2, 3), (2, 3, 0)),
    ],
)
def test_empty_operands(evaluate: Any, x: Any, w: Any, result: Any) -> None:
    (got,) = evaluate(convolution, np.ones(x, np.float32), np.ones(w, np.float32), **PLAIN)
    np.testing.assert_array_equal(got, np.zeros(result, np.float32))
    grad = np.ones(result, np.float32)
    attrs = {**GRADIENT, "input_spatial": x[2:]}
    (got,) = evaluate(convolution_input_grad, grad, np.ones(w, np.float32), **attrs)
    assert got.shape == x
    assert not got.any()
    attrs = {**GRADIENT, "kernel_spatial": w[2:]}
    (got,) = evaluate(convolution_weight_grad, np.ones(x, np.float32), grad, **attrs)
    assert got.shape == w
    assert not got.any()


# Each of the first five constraints holds for all three ops.


def test_convolution_c1_ranks(refuses: Any) -> None:
    refuses(convolution, 1, "f32[2, 3, 5]", "f32[4, 3, 3, 3]", **PLAIN)
    refuses(convolution, 1, "f32[2, 3]", "f32[4, 3]", **PLAIN)
    refuses(convolution, 1, "f32[2, 3, 1, 1, 1, 1]", "f32[4, 3, 1, 1, 1, 1]", **PLAIN)


def test_convolution_input_grad_c1_ranks(refuses: Any) -> None:
    refuses(convolution_input_grad, 1, "f32[2, 4, 3]", "f32[4, 3]", **INPUT_GRAD)
    wrong = {**INPUT_GRAD, "input_spatial": (5, 5)}
    refuses(convolution_input_grad, 1, "f32[2, 4, 3]", "f32[4, 3, 3]", **wrong)
    wrong = {**INPUT_GRAD, "input_spatial": (-5,)}
    refuses(convolution_input_grad, 1, "f32[2, 4, 3]", "f32[4, 3, 3]", **wrong)


def test_convolution_weight_grad_c1_ranks(refuses: Any) -> None:
    wrong = {**WEIGHT_GRAD, "kernel_spatial": (3, 3)}
    refuses(convolution_weight_grad, 1, "f32[2, 3, 5]", "f32[2, 4, 3]", **wrong)
    refuses(convolution_weight_grad, 1, "f32[2, 3]", "f32[2, 4]", **WEIGHT_GRAD)


def test_convolution_c2_one_dtype(refuses: Any) -> None:
    refuses(convolution, 2, "f32[2, 3, 5]", "bf16[4, 3, 3]", **PLAIN)
    refuses(convolution, 2, "bool[2, 3, 5]", "bool[4, 3, 3]", **PLAIN)


def test_convolution_input_grad_c2_one_dtype(refuses: Any) -> None:
    refuses(convolution_input_grad, 2, "f32[2, 4, 3]", "f64[4, 3, 3]", **INPUT_GRAD)


def test_convolution_weight_grad_c2_one_dtype(refuses: Any) -> None:
    refuses(convolution_weight_grad, 2, "f32[2, 3, 5]", "f64[2, 4, 3]", **WEIGHT_GRAD)


def test_convolution_c3_one_entry_for_each_dimension(refuses: Any) -> None:
    for wrong in (
        dict(strides=(1, 1)),
        dict(strides=(0,)),
        dict(padding=((0, 0), (0, 0))),
        dict(padding=((0,),)),
        dict(lhs_dilation=()),
        dict(lhs_dilation=(0,)),
        dict(rhs_dilation=(-1,)),
    ):
        refuses(convolution, 3, "f32[2, 3, 5]", "f32[4, 3, 3]", **{**PLAIN, **wrong})


def test_convolution_gradients_c3_one_entry_for_each_dimension(refuses: Any) -> None:
    wrong = dict(strides=())
    refuses(convolution_input_grad, 3, "f32[2, 4, 3]", "f32[4, 3, 3]", **{**INPUT_GRAD, **wrong})
    refuses(convolution_weight_grad, 3, "f32[2, 3, 5]", "f32[2, 4, 3]", **{**WEIGHT_GRAD, **wrong})


def test_convolution_c4_groups_divide_the_channels(refuses: Any) -> None:
    refuses(convolution, 4, "f32[2, 3, 5]", "f32[4, 2, 3]", **PLAIN)
    refuses(convolution, 4, "f32[2, 4, 5]", "f32[3, 2, 3]", **{**PLAIN, "groups": 2})
    refuses(convolution, 4, "f32[2, 3, 5]", "f32[4, 3, 3]", **{**PLAIN, "groups": 0})


def test_convolution_gradients_c4_groups_divide_the_channels(refuses: Any) -> None:
    groups = {"groups": 3}
    refuses(convolution_input_grad, 4, "f32[2, 4, 3]", "f32[4, 1, 3]", **{**INPUT_GRAD, **groups})
    refuses(convolution_weight_grad, 4, "f32[2, 4, 5]", "f32[2, 3, 3]", **{**WEIGHT_GRAD, **groups})


def test_convolution_c5_the_kernel_is_not_empty(refuses: Any) -> None:
    refuses(convolution, 5, "f32[2, 3, 5]", "f32[4, 3, 0]", **PLAIN)


def test_convolution_gradients_c5_the_kernel_is_not_empty(refuses: Any) -> None:
    refuses(convolution_input_grad, 5, "f32[2, 4, 3]", "f32[4, 3, 0]", **INPUT_GRAD)
    wrong = {**WEIGHT_GRAD, "kernel_spatial": (0,)}
    refuses(convolution_weight_grad, 5, "f32[2, 3, 5]", "f32[2, 4, 3]", **wrong)


def test_convolution_c6_batch_groups(refuses: Any, accepts: Any) -> None:
    refuses(convolution, 6, "f32[3, 3, 5]", "f32[4, 3, 3]", **PLAIN, batch_groups=2)
    refuses(convolution, 6, "f32[4, 3, 5]", "f32[3, 3, 3]", **PLAIN, batch_groups=2)
    refuses(convolution, 6, "f32[4, 3, 5]", "f32[4, 3, 3]", **PLAIN, batch_groups=0)
    both = {**PLAIN, "groups": 2, "batch_groups": 2}
    refuses(convolution, 6, "f32[4, 4, 5]", "f32[4, 2, 3]", **both)
    (result,) = accepts(convolution, "f32[4, 3, 5]", "f32[4, 3, 3]", **PLAIN, batch_groups=2)
    assert str(result) == "f32[2, 4, 3]"


def test_convolution_gradients_c6_grad_has_the_type_of_the_result(refuses: Any) -> None:
    refuses(convolution_input_grad, 6, "f32[2, 4, 4]", "f32[4, 3, 3]", **INPUT_GRAD)
    refuses(convolution_input_grad, 6, "f32[2, 5, 3]", "f32[4, 3, 3]", **INPUT_GRAD)
    refuses(convolution_weight_grad, 6, "f32[2, 3, 5]", "f32[1, 4, 3]", **WEIGHT_GRAD)


def test_convolution_c7_negative_padding_crops_and_no_place_gives_size_0(evaluate: Any) -> None:
    x = np.arange(5, dtype=np.float32).reshape(1, 1, 5)
    one = np.ones((1, 1, 1), np.float32)
    (got,) = evaluate(convolution, x, one, **{**PLAIN, "padding": ((-2, -1),)})
    np.testing.assert_array_equal(got[0, 0], [2, 3])
    (got,) = evaluate(convolution, x, one, **{**PLAIN, "padding": ((-7, 4),)})
    np.testing.assert_array_equal(got[0, 0], [0, 0])
    (got,) = evaluate(convolution, x, one, **{**PLAIN, "padding": ((-7, -7),)})
    assert got.shape == (1, 1, 0)
    dilated = {**PLAIN, "padding": ((-1, 0),), "lhs_dilation": (2,)}
    (got,) = evaluate(convolution, x, one, **dilated)
    np.testing.assert_array_equal(got[0, 0], [0, 1, 0, 2, 0, 3, 0, 4])


def test_the_three_products_cost_the_same() -> None:
    x, w, out = (TensorType(DTYPES["f32"], s) for s in ((2, 4, 9), (6, 2, 3), (2, 6, 7)))
    cost = 2 * out.size * 2 * 3
    assert convolution.flops([x, w], PLAIN, [out]) == cost
    assert convolution_input_grad.flops([out, w], INPUT_GRAD, [x]) == cost
    assert convolution_weight_grad.flops([x, out], WEIGHT_GRAD, [w]) == cost
