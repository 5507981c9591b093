"""attention and its backward against torch, in f64."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from plait.core_ir.ops.attention import attention, attention_backward
from plait.core_ir.types import DTYPES, TensorType

PLAIN: dict[str, Any] = dict(causal=False, scale=0.5)
QKV = ("f32[2, 4, 5, 8]", "f32[2, 2, 7, 8]", "f32[2, 2, 7, 6]")
RESULTS = ("f32[2, 4, 5, 6]", "f32[2, 4, 5]")
SHAPES = [(2, 4, 2, 5, 7, 8, 6), (1, 3, 3, 6, 4, 2, 2), (2, 4, 1, 3, 3, 5, 1)]


def operands(shape: Any, dtype: Any = np.float64, seed: int = 0) -> list[np.ndarray]:
    """q, k, v of sizes (B, H, Hk, T, S, E, Ev)."""
    b, h, hk, t, s, e, ev = shape
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n).astype(dtype) for n in ((b, h, t, e), (b, hk, s, e), (b, hk, s, ev))]


def by_torch(arrays: list[np.ndarray], causal: bool, scale: float) -> Any:
    """(out, log-sum-exp, leaves) by torch's own formula."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
    q, k, v, *bias = leaves
    groups = q.shape[1] // k.shape[1]
    k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
    mask = torch.zeros(q.shape[:3] + k.shape[2:3], dtype=q.dtype)
    if causal:
        mask = mask.masked_fill(~torch.ones(mask.shape[2:], dtype=torch.bool).tril(), -math.inf)
    if bias:
        mask = mask + bias[0]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    lse = torch.logsumexp(q @ k.transpose(-1, -2) * scale + mask, -1)
    return out, lse, leaves


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("causal", "bias"), tuple(product((False, True), (None, (1, 1), (2, 4)))))
def test_attention_and_backward_equal_torch(
    evaluate: Any, shape: Any, causal: bool, bias: tuple[int, int] | None
) -> None:
    arrays = operands(shape)
    if bias:
        b, h, _, t, s, _, _ = shape
        sizes = (min(bias[0], b), min(bias[1], h), t, s)
        arrays.append(np.random.default_rng(1).normal(size=sizes))
    attrs = dict(causal=causal, scale=0.3)
    expected, expected_lse, leaves = by_torch(arrays, **attrs)
    out, lse = evaluate(attention, *arrays, **attrs)
    assert lse.dtype == np.float64
    np.testing.assert_allclose(out, expected.detach(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse.detach(), rtol=1e-12)
    grad = np.random.default_rng(2).normal(size=out.shape)
    expected.backward(torch.from_numpy(grad))
    q, k, v, *rest = arrays
    grads = evaluate(
        attention_backward, grad, q, k, v, out, lse, *rest, **attrs, bias_grad=bias is not None
    )
    for got, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(got, leaf.grad, rtol=1e-11, atol=1e-13)


def test_bias_gradient_is_given_only_where_asked_for(evaluate: Any, accepts: Any) -> None:
    q, k, v = operands(SHAPES[0])
    bias = np.ones((1, 1, 5, 7))
    out, lse = evaluate(attention, q, k, v, bias, **PLAIN)
    assert len(evaluate(attention_backward, out, q, k, v, out, lse, bias, **PLAIN)) == 3
    types = ("f32[2, 4, 5, 6]", *QKV, *RESULTS, "bf16[1, 4, 5, 7]")
    results = accepts(attention_backward, *types, **PLAIN, bias_grad=True)
    assert [str(t) for t in results] == [*QKV, "bf16[1, 4, 5, 7]"]


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_narrow_floats_are_computed_in_f32(evaluate: Any, name: str) -> None:
    arrays = operands(SHAPES[0], DTYPES[name].numpy)
    wide = [x.astype(np.float64) for x in arrays]
    out, lse = evaluate(attention, *arrays, **PLAIN)
    expected, expected_lse = evaluate(attention, *wide, **PLAIN)
    assert (out.dtype, lse.dtype) == (arrays[0].dtype, np.float32)
    step = {"f16": 2**-11, "bf16": 2**-8, "f32": 1e-5}[name]  # rounding of the result alone
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=1.01 * step, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    grad = np.ones_like(out)
    grads = evaluate(attention_backward, grad, *arrays, out, lse, **PLAIN)
    wide_grad, wide_out = grad.astype(np.float64), out.astype(np.float64)
    expected_grads = evaluate(
        attention_backward, wide_grad, *wide, wide_out, lse.astype(np.float64), **PLAIN
    )
    for got, want in zip(grads, expected_grads, strict=True):
        assert got.dtype == out.dtype
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=1.01 * step, atol=1e-5)


def test_large_scores_do_not_overflow(evaluate: Any) -> None:
    q, k, v = operands((1, 1, 1, 3, 3, 4, 4), np.float32)
    out, lse = evaluate(attention, 1e4 * q, 1e4 * k, v, **PLAIN)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert all(
        np.isfinite(g).all()
        for g in evaluate(attention_backward, out, 1e4 * q, 1e4 * k, v, out, lse, **PLAIN)
    )


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 3, 3, 4, 4), (1, 2, 1, 0, 3, 4, 4), (1, 2, 1, 3, 2, 0, 1)]
)
def test_empty_operands(evaluate: Any, shape: Any) -> None:
    q, k, v = operands(shape, np.float32)
    out, lse = evaluate(attention, q, k, v, **PLAIN)
    grads = evaluate(attention_backward, out, q, k, v, out, lse, **PLAIN)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    np.testing.assert_allclose(grads[2].sum(), out.sum(), rtol=1e-5)  # weights of a row sum to 1


def test_attention_c1_ranks(refuses: Any) -> None:
    refuses(attention, 1, "f32[4, 5, 8]", *QKV[1:], **PLAIN)


def test_attention_c2_one_dtype(refuses: Any) -> None:
    refuses(attention, 2, "f64[2, 4, 5, 8]", *QKV[1:], **PLAIN)
    ints = [t.replace("f32", "i32") for t in QKV]
    refuses(attention, 2, *ints, **PLAIN)


def test_attention_c3_batch_and_keys_agree(refuses: Any) -> None:
    refuses(attention, 3, "f32[3, 4, 5, 8]", *QKV[1:], **PLAIN)
    refuses(attention, 3, *QKV[:2], "f32[2, 2, 6, 6]", **PLAIN)
    refuses(attention, 3, *QKV[:2], "f32[2, 4, 7, 6]", **PLAIN)


def test_attention_c4_head_sizes_of_q_and_k_agree(refuses: Any) -> None:
    refuses(attention, 4, "f32[2, 4, 5, 9]", *QKV[1:], **PLAIN)


def test_attention_c5_heads_form_groups(refuses: Any) -> None:
    refuses(attention, 5, "f32[2, 3, 5, 8]", *QKV[1:], **PLAIN)
    refuses(attention, 5, "f32[2, 4, 5, 8]", "f32[2, 0, 7, 8]", "f32[2, 0, 7, 6]", **PLAIN)


def test_attention_c6_bias_stands_at_every_pair(refuses: Any, accepts: Any) -> None:
    for bias in ("f32[2, 2, 5, 7]", "f32[1, 1, 1, 7]", "f32[5, 7]", "bool[1, 1, 5, 7]"):
        refuses(attention, 6, *QKV, bias, **PLAIN)
    for bias in ("f32[2, 4, 5, 7]", "f32[1, 4, 5, 7]", "bf16[2, 1, 5, 7]"):
        assert [str(t) for t in accepts(attention, *QKV, bias, **PLAIN)] == list(RESULTS)


def test_attention_c7_three_or_four_operands(refuses: Any) -> None:
    refuses(attention, 7, *QKV[:2], **PLAIN)
    refuses(attention, 7, *QKV, "f32[1, 1, 5, 7]", "f32[1, 1, 5, 7]", **PLAIN)


def test_attention_c8_causal_counts_from_the_first_query_and_key(evaluate: Any) -> None:
    q, k, v = operands((1, 1, 1, 2, 4, 3, 3))
    out, _ = evaluate(attention, q, k, v, causal=True, scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0, 0])
    rest, _ = evaluate(attention, q[:, :, 1:], k[:, :, :2], v[:, :, :2], causal=False, scale=1.0)
    np.testing.assert_allclose(out[0, 0, 1], rest[0, 0, 0])


def test_attention_c9_a_row_that_sees_nothing_gives_0(evaluate: Any) -> None:
    q, k, v = operands((1, 2, 1, 3, 4, 5, 5), np.float32)
    bias = np.zeros((1, 1, 3, 4), np.float32)
    bias[0, 0, 1] = -np.inf
    out, lse = evaluate(attention, q, k, v, bias, **PLAIN)
    assert not out[:, :, 1].any()
    assert (lse[:, :, 1] == -np.inf).all()
    assert np.isfinite(np.delete(lse, 1, 2)).all()
    grad = np.ones_like(out)
    grads = evaluate(attention_backward, grad, q, k, v, out, lse, bias, **PLAIN, bias_grad=True)
    assert all(np.isfinite(g).all() for g in grads)
    assert not grads[0][:, :, 1].any()
    assert not grads[3][:, :, 1].any()
    no_keys = evaluate(attention, q, k[:, :, :0], v[:, :, :0], **PLAIN)
    assert not no_keys[0].any()
    assert (no_keys[1] == -np.inf).all()


def test_attention_backward_c1_to_c6_are_those_of_attention(refuses: Any) -> None:
    grad, (q, k, v) = RESULTS[0], QKV
    refuses(attention_backward, 1, grad, "f32[4, 5, 8]", k, v, *RESULTS, **PLAIN)
    refuses(attention_backward, 2, grad, "f64[2, 4, 5, 8]", k, v, *RESULTS, **PLAIN)
    refuses(attention_backward, 3, grad, "f32[3, 4, 5, 8]", k, v, *RESULTS, **PLAIN)
    refuses(attention_backward, 4, grad, "f32[2, 4, 5, 9]", k, v, *RESULTS, **PLAIN)
    refuses(attention_backward, 5, grad, "f32[2, 3, 5, 8]", k, v, *RESULTS, **PLAIN)
    refuses(attention_backward, 6, grad, q, k, v, *RESULTS, "f32[5, 7]", **PLAIN)


def test_attention_backward_c7_six_or_seven_operands(refuses: Any) -> None:
    refuses(attention_backward, 7, RESULTS[0], *QKV, RESULTS[0], **PLAIN)


def test_attention_backward_c8_grad_and_out(refuses: Any) -> None:
    refuses(attention_backward, 8, "f32[2, 4, 5, 7]", *QKV, *RESULTS, **PLAIN)
    refuses(attention_backward, 8, RESULTS[0], *QKV, "f64[2, 4, 5, 6]", RESULTS[1], **PLAIN)


def test_attention_backward_c9_lse(refuses: Any) -> None:
    refuses(attention_backward, 9, RESULTS[0], *QKV, RESULTS[0], "f64[2, 4, 5]", **PLAIN)
    refuses(attention_backward, 9, RESULTS[0], *QKV, RESULTS[0], "f32[2, 4, 5, 1]", **PLAIN)
    wide = [t.replace("f32", "f64") for t in (RESULTS[0], *QKV, RESULTS[0])]
    refuses(attention_backward, 9, *wide, "f32[2, 4, 5]", **PLAIN)


def test_attention_backward_c10_a_bias_gradient_needs_a_bias(refuses: Any) -> None:
    refuses(attention_backward, 10, RESULTS[0], *QKV, *RESULTS, **PLAIN, bias_grad=True)


def test_flops_count_the_pairs_that_are_seen() -> None:
    q, k, v = (TensorType(DTYPES["f32"], s) for s in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)))
    assert attention.flops([q, k, v], PLAIN, []) == 2 * 8 * 35 * (8 + 6)
    causal = {**PLAIN, "causal": True}
    assert attention.flops([q, k, v], causal, []) == 2 * 8 * (1 + 2 + 3 + 4 + 5) * (8 + 6)
    tall = q.with_shape((2, 4, 9, 8))
    seen = 1 + 2 + 3 + 4 + 5 + 6 + 7 + 7 + 7
    assert attention.flops([tall, k, v], causal, []) == 2 * 8 * seen * (8 + 6)
    assert attention_backward.flops([q, q, k, v], PLAIN, []) == 2 * 8 * 35 * (3 * 8 + 2 * 6)
