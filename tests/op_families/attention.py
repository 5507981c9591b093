"""Cases of attention and its backward: grouped heads, masks, fully masked rows, odd sizes."""

import numpy as np
from op_families.case import Array, Call, OpCase, call, case, random


def _bias(*shape: int, masked_row: bool = False) -> Array:
    bias = random("f32", *shape, seed=5)
    bias[..., 0] = -np.inf
    if masked_row:
        bias[..., 1, :] = -np.inf
    return bias


def _forwards() -> list[tuple[str, Call]]:
    def qkv(
        dtype: str, b: int, h: int, hk: int, t: int, s: int, e: int, ev: int
    ) -> tuple[Array, ...]:
        return (
            random(dtype, b, h, t, e),
            random(dtype, b, hk, s, e, seed=1),
            random(dtype, b, hk, s, ev, seed=2),
        )

    return [
        ("plain", call(*qkv("f32", 2, 3, 3, 5, 5, 4, 4), causal=False, scale=0.5)),
        ("causal", call(*qkv("f32", 2, 2, 2, 6, 6, 8, 8), causal=True, scale=0.3)),
        ("causal-wide", call(*qkv("f32", 1, 2, 2, 3, 7, 8, 8), causal=True, scale=0.3)),
        ("causal-tall", call(*qkv("f32", 1, 2, 2, 7, 3, 8, 8), causal=True, scale=0.3)),
        ("grouped", call(*qkv("f32", 2, 6, 2, 4, 5, 8, 8), causal=True, scale=0.35)),
        ("values", call(*qkv("f32", 2, 2, 1, 4, 5, 8, 3), causal=False, scale=0.35)),
        (
            "bias",
            call(*qkv("f32", 2, 2, 2, 4, 5, 8, 8), _bias(1, 1, 4, 5), causal=False, scale=0.35),
        ),
        (
            "masked-row",
            call(
                *qkv("f32", 2, 4, 2, 4, 5, 8, 8),
                _bias(2, 4, 4, 5, masked_row=True),
                causal=False,
                scale=0.35,
            ),
        ),
        (
            "bias-causal",
            call(*qkv("f32", 2, 2, 2, 4, 4, 8, 8), _bias(2, 1, 4, 4), causal=True, scale=0.35),
        ),
        ("negative-scale", call(*qkv("f32", 1, 1, 1, 3, 3, 2, 2), causal=False, scale=-1.0)),
        ("f64", call(*qkv("f64", 2, 2, 2, 4, 4, 8, 8), causal=True, scale=0.35)),
        ("bf16", call(*qkv("bf16", 2, 2, 2, 4, 4, 8, 8), causal=True, scale=0.35)),
        ("f16", call(*qkv("f16", 2, 2, 1, 4, 4, 8, 8), causal=False, scale=0.35)),
        ("empty", call(*qkv("f32", 0, 2, 2, 4, 4, 8, 8), causal=False, scale=0.35)),
        ("no-keys", call(*qkv("f32", 1, 2, 2, 4, 0, 8, 8), causal=False, scale=0.35)),
        ("long", call(*qkv("f32", 1, 2, 1, 70, 67, 16, 16), causal=True, scale=0.25)),
    ]


def _cases() -> list[OpCase]:
    cases = []
    for label, forward in _forwards():
        (q, k, v, *bias), attrs = forward
        made = case("attention", label, forward, tolerance="summed")
        cases.append(made)
        out, lse = made.expected()
        grad = random("f64", *out.shape, seed=4).astype(out.dtype)
        backward = call(grad, q, k, v, out, lse, *bias, **attrs)
        cases.append(case("attention_backward", label, backward, tolerance="summed"))
        if bias:
            backward = call(grad, q, k, v, out, lse, *bias, **attrs, bias_grad=True)
            cases.append(case("attention_backward", f"{label}-grad", backward, tolerance="summed"))
    return cases


CASES = _cases()
