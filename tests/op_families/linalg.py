"""Cases of matrix products, convolutions and triangular systems."""

import numpy as np
from op_families.case import Array, OpCase, call, case, named, random

from plait.core_ir.types import DType


def _dots() -> list[OpCase]:
    plain = dict(batch=((), ()), contract=((1,), (0,)))
    calls = [
        call(random(d, 3, 4), random(d, 4, 5, seed=1), **plain)
        for d in ("f32", "f64", "f16", "bf16", "c64")
    ]
    f32: DType = named("f32")
    calls += [
        call(
            random("f32", 4, 3), random("f32", 5, 4, seed=1), batch=((), ()), contract=((0,), (1,))
        ),
        call(
            random("f32", 2, 3, 4),
            random("f32", 4, 5, seed=1),
            batch=((), ()),
            contract=((2,), (0,)),
        ),
        call(
            random("f32", 2, 3, 4),
            random("f32", 2, 3, 5),
            batch=((), ()),
            contract=((0, 1), (0, 1)),
        ),
        call(
            random("f32", 2, 3, 4),
            random("f32", 3, 5, 2),
            batch=((), ()),
            contract=((0, 1), (2, 0)),
        ),
        call(
            random("f32", 2, 3, 4),
            random("f32", 2, 4, 5),
            batch=((0,), (0,)),
            contract=((2,), (1,)),
        ),
        call(
            random("f32", 2, 3, 6, 4),
            random("f32", 5, 3, 4, 2),
            batch=((0, 1), (3, 1)),
            contract=((3,), (2,)),
        ),
        call(random("f32", 3, 2), random("f32", 4, 5), batch=((), ()), contract=((), ())),
        call(random("f32", 3, 2), random("f32", 3, 5), batch=((0,), (0,)), contract=((), ())),
        call(random("f32", 3), random("f32", 3), batch=((), ()), contract=((0,), (0,))),
        call(random("f32", 3), random("f32", 3), batch=((0,), (0,)), contract=((), ())),
        call(random("f32"), random("f32"), batch=((), ()), contract=((), ())),
        call(random("f32", 0, 4), random("f32", 4, 5), **plain),
        call(random("f32", 3, 0), random("f32", 0, 5), **plain),
        call(random("bf16", 3, 4), random("bf16", 4, 5), dtype=f32, **plain),
        call(random("f8e4m3fn", 3, 4), random("f8e4m3fn", 4, 5), dtype=f32, **plain),
    ]
    whole = [
        call(random(d, 3, 4), random(d, 4, 5, seed=1), **plain) for d in ("i32", "i64", "u8", "u32")
    ]
    whole += [call(random("i8", 3, 4), random("i8", 4, 5), dtype=named("i32"), **plain)]
    return [
        case("dot_general", "float", *calls, tolerance="summed"),
        case("dot_general", "integer", *whole),
    ]


def _convolutions() -> list[OpCase]:
    one = dict(lhs_dilation=(1, 1), rhs_dilation=(1, 1), groups=1)
    x, w = random("f32", 2, 4, 6, 5), random("f32", 6, 4, 3, 2, seed=1)
    none, same = ((0, 0), (0, 0)), ((1, 1), (0, 1))
    calls = [
        call(x, w, strides=(1, 1), padding=none, **one),
        call(x, w, strides=(2, 1), padding=same, **one),
        call(x, w, strides=(1, 2), padding=((2, 0), (1, 3)), **one),
        call(x, w, strides=(1, 1), padding=((-1, 0), (0, -2)), **one),
        call(x, w, strides=(1, 1), padding=((2, 2), (0, 1)), **{**one, "rhs_dilation": (2, 1)}),
        call(x, w, strides=(1, 1), padding=same, **{**one, "lhs_dilation": (2, 3)}),
        call(x, random("f32", 6, 2, 3, 2), strides=(1, 1), padding=same, **{**one, "groups": 2}),
        call(x, random("f32", 8, 1, 2, 2), strides=(2, 2), padding=none, **{**one, "groups": 4}),
        call(x, random("f32", 6, 4, 1, 1), strides=(1, 1), padding=none, **one),
        call(random("f32", 0, 4, 6, 5), w, strides=(1, 1), padding=none, **one),
        call(
            random("f32", 4, 3, 5, 5),
            random("f32", 6, 3, 2, 2),
            strides=(1, 1),
            padding=none,
            batch_groups=2,
            **one,
        ),
        call(
            random("f32", 2, 3, 7),
            random("f32", 4, 3, 3),
            strides=(2,),
            padding=((1, 0),),
            lhs_dilation=(1,),
            rhs_dilation=(1,),
            groups=1,
        ),
        call(
            random("f32", 2, 2, 4, 3, 5),
            random("f32", 3, 2, 2, 2, 2),
            strides=(1, 2, 1),
            padding=((0, 1), (1, 1), (0, 0)),
            lhs_dilation=(1,) * 3,
            rhs_dilation=(1,) * 3,
            groups=1,
        ),
        *(
            call(random(d, 2, 4, 6, 5), random(d, 6, 4, 3, 2), strides=(1, 1), padding=same, **one)
            for d in ("f64", "bf16", "f16")
        ),
    ]
    return [case("convolution", "all", *calls, tolerance="summed"), *_convolution_gradients()]


def _convolution_gradients() -> list[OpCase]:
    inputs, weights = [], []
    for dtype, spatial, kernel, strides, padding, dilation, groups in (
        ("f32", (6, 5), (3, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
        ("f32", (6, 5), (3, 2), (2, 2), ((1, 1), (0, 1)), (1, 1), 1),
        ("f32", (6, 5), (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), 2),
        ("f32", (6, 7), (2, 2), (3, 2), ((0, 0), (1, 2)), (2, 1), 4),
        ("f32", (6, 5), (2, 2), (1, 1), ((-1, 0), (0, -1)), (1, 1), 1),
        ("f32", (7,), (3,), (2,), ((1, 0),), (1,), 1),
        ("f32", (4, 3, 4), (2, 2, 2), (1, 1, 2), ((0, 0), (1, 1), (0, 0)), (1, 1, 1), 1),
        ("f64", (6, 5), (3, 3), (2, 1), ((1, 1), (1, 1)), (1, 1), 1),
        ("bf16", (6, 5), (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    ):
        x = random(dtype, 2, 4, *spatial)
        w = random(dtype, 8, 4 // groups, *kernel, seed=1)
        out = tuple(
            (n + lo + hi - d * (k - 1) - 1) // s + 1
            for n, k, s, (lo, hi), d in zip(
                spatial, kernel, strides, padding, dilation, strict=True
            )
        )
        grad = random(dtype, 2, 8, *out, seed=2)
        how = dict(strides=strides, padding=padding, rhs_dilation=dilation, groups=groups)
        inputs.append(call(grad, w, input_spatial=spatial, **how))
        weights.append(call(x, grad, kernel_spatial=kernel, **how))
    return [
        case("convolution_input_grad", "all", *inputs, tolerance="summed"),
        case("convolution_weight_grad", "all", *weights, tolerance="summed"),
    ]


def _grouped() -> OpCase:
    x, w = random("f32", 7, 3), random("f32", 4, 3, 5, seed=1)
    calls = [
        call(x, w, np.array(sizes, np.int32))
        for sizes in ([2, 0, 4, 1], [7, 0, 0, 0], [0, 0, 0, 7], [1, 2, 1, 1], [0, 0, 0, 0])
    ]
    calls += [
        call(random(d, 7, 3), random(d, 2, 3, 5), np.array([3, 4], np.int32))
        for d in ("f64", "bf16")
    ]
    calls += [call(random("f32", 0, 3), w, np.zeros(4, np.int32))]
    return case("grouped_matmul", "all", *calls, tolerance="summed")


def _definite(dtype: str, *shape: int) -> Array:
    x = random(dtype, *shape)
    square = x @ np.conj(np.swapaxes(x, -1, -2))
    return np.asarray((square + 3 * np.eye(shape[-1])).astype(x.dtype))


def _systems() -> list[OpCase]:
    factors = [
        call(_definite(d, *shape), lower=lower)
        for d, shape in (("f32", (3, 3)), ("f64", (2, 4, 4)), ("c64", (3, 3)), ("f32", (0, 3, 3)))
        for lower in (True, False)
    ]
    solves = [
        call(
            _definite(d, 2, 3, 3),
            random(d, 2, 3, 4, seed=1) if left else random(d, 2, 4, 3, seed=1),
            left_side=left,
            lower=lower,
            transpose_a=transposed,
            conjugate_a=conjugate,
            unit_diagonal=unit,
        )
        for d, conjugate in (("f32", False), ("f64", False), ("c64", True))
        for left in (True, False)
        for lower in (True, False)
        for transposed in (True, False)
        for unit in (True, False)
    ]
    return [
        case("cholesky", "all", *factors, tolerance="summed"),
        case("triangular_solve", "all", *solves, tolerance="summed"),
    ]


CASES = [*_dots(), *_convolutions(), _grouped(), *_systems()]
