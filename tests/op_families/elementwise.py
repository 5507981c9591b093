"""Cases of the elementwise ops."""

import numpy as np
from op_families.case import (
    ALL,
    COMPLEX,
    FLOATS,
    INTEGERS,
    SIGNED,
    SMALL_FLOATS,
    UNSIGNED,
    OpCase,
    call,
    case,
    cast,
    edges,
    named,
    pairs,
    random,
)

EXACT_FLOAT = ("neg", "abs", "sign", "floor", "ceil", "trunc", "is_finite")
ROUNDED_FLOAT = (
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "cbrt", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "logistic"),
    *("erf", "erfc", "erf_inv"),
)
ROUNDED_COMPLEX = (
    *("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tan", "asinh", "acosh", "atanh"),
    *("sinh", "cosh", "tanh", "asin", "acos", "atan", "logistic", "expm1", "log1p", "abs", "sign"),
)


def _over(dtypes: tuple[str, ...], **attrs: object) -> list[object]:
    return [call(edges(d), **attrs) for d in dtypes]


def _shapes(dtype: str, num_operands: int = 1, **attrs: object) -> list[object]:
    shapes = ((), (0,), (2, 0, 3), (1, 3, 2))
    return [
        call(*(random(dtype, *s, seed=i) for i in range(num_operands)), **attrs) for s in shapes
    ]


def _unary() -> list[OpCase]:
    cases = []
    for op in EXACT_FLOAT:
        cases.append(case(op, "float", *_over(FLOATS), *_shapes("f32")))
        cases.append(case(op, "f8", *_over(SMALL_FLOATS)))
    for op in ("neg", "abs", "sign"):
        cases.append(case(op, "signed", *_over(SIGNED), *_shapes("i32")))
    for op in ("neg", "sign"):
        cases.append(case(op, "unsigned", *_over(UNSIGNED)))
    for op in ROUNDED_FLOAT:
        cases.append(case(op, "float", *_over(FLOATS), *_shapes("f32"), tolerance="rounded"))
    cases.append(case("exp", "f8", *_over(SMALL_FLOATS), tolerance="rounded"))
    for op in ROUNDED_COMPLEX:
        cases.append(case(op, "complex", *_over(COMPLEX), tolerance="rounded"))
    for op in ("lgamma", "digamma"):
        positive = np.array([0.25, 0.5, 1, 1.75, 2, 3.5, 11, 40, np.inf, np.nan])
        calls = [call(cast(positive, d)) for d in FLOATS]
        cases.append(case(op, "float", *calls, tolerance="rounded"))
    halves = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 8388609.0, np.nan, np.inf])
    for mode in ("half_even", "half_away"):
        calls = [call(cast(halves, d), mode=mode) for d in FLOATS]
        cases.append(case("round", mode, *calls, *_over(SMALL_FLOATS, mode=mode)))
    cases.append(case("not", "integer", *_over(("bool", *INTEGERS)), *_shapes("bool")))
    for op in ("population_count", "count_leading_zeros"):
        cases.append(case(op, "integer", *_over(INTEGERS), *_shapes("i32")))
    for op in ("real", "imag", "conj", "neg"):
        cases.append(case(op, "complex", *_over(COMPLEX), *_shapes("c64")))
    return cases


def _binary() -> list[OpCase]:
    cases = []
    for op in ("add", "sub", "mul", "div", "max", "min"):
        calls = [call(*pairs(d)) for d in FLOATS]
        cases.append(case(op, "float", *calls, *_shapes("f32", 2)))
        cases.append(case(op, "f8", *(call(*pairs(d)) for d in SMALL_FLOATS)))
    for op in ("add", "sub", "mul", "max", "min"):
        cases.append(case(op, "signed", *(call(*pairs(d)) for d in SIGNED), *_shapes("i64", 2)))
        cases.append(case(op, "unsigned", *(call(*pairs(d)) for d in UNSIGNED)))
    for op in ("add", "sub", "mul", "div"):
        calls = [call(random(d, 7), random(d, 7, seed=1)) for d in COMPLEX]
        cases.append(case(op, "complex", *calls, tolerance="rounded"))
    for op in ("and", "or", "xor"):
        calls = [call(*pairs(d)) for d in ("bool", *INTEGERS)]
        cases.append(case(op, "integer", *calls, *_shapes("bool", 2)))
    for op in ("shift_left", "shift_right_logical", "shift_right_arithmetic"):
        calls = []
        for d in INTEGERS:
            bits = named(d).itemsize * 8
            amounts = np.array([0, 1, 3, bits - 1, bits, bits + 1, 100], named(d).numpy)
            calls.append(call(*pairs(d, amounts)))
        cases.append(case(op, "integer", *calls, *_shapes("u32", 2)))
    for rounding in ("trunc", "floor"):
        calls = [call(*pairs(d), rounding=rounding) for d in INTEGERS]
        cases.append(case("int_div", rounding, *calls))
    for sign in ("dividend", "divisor"):
        calls = [call(*pairs(d), sign=sign) for d in INTEGERS]
        cases.append(case("rem", f"{sign}-integer", *calls))
        some = np.array([-3, -2.5, -0.5, 0.75, 2, 5, np.nan, np.inf])
        calls = []
        for d in ("f32", "f64", "bf16"):
            right = cast(some, d)
            calls.append(call(*pairs(d, right), sign=sign))
        cases.append(case("rem", f"{sign}-float", *calls))
    for op in ("pow", "atan2"):
        calls = [call(*pairs(d)) for d in ("f32", "f64")]
        calls += [call(np.abs(random(d, 9)), random(d, 9, seed=1)) for d in ("f16", "bf16")]
        cases.append(case(op, "float", *calls, *_shapes("f64", 2), tolerance="rounded"))
    calls = [call(*pairs(d, np.array([0, 1, 2, 3, 7], named(d).numpy))) for d in INTEGERS]
    cases.append(case("pow", "integer", *calls))
    calls = [call(random(d, 9), random(d, 9, seed=1)) for d in COMPLEX]
    cases.append(case("pow", "complex", *calls, tolerance="rounded"))
    some = np.array([1.0, 1.0, -1.0, 2.5, 2.5, np.inf, np.nan, 1.0])
    to = np.array([2.0, 0.0, -3.0, 2.5, -np.inf, 0.0, 1.0, np.nan])
    calls = [call(cast(some, d), cast(to, d)) for d in ("f32", "f64")]
    cases.append(case("nextafter", "float", *calls))
    calls = [call(random(d, 2, 3), random(d, 2, 3, seed=1)) for d in ("f32", "f64")]
    cases.append(case("complex", "float", *calls))
    return cases


def _choosing() -> list[OpCase]:
    cases = []
    for direction in ("eq", "ne", "lt", "le", "gt", "ge"):
        dtypes = ("bool", *FLOATS, *SMALL_FLOATS, *INTEGERS)
        calls = [call(*pairs(d), direction=direction) for d in dtypes]
        shapes = _shapes("f32", 2, direction=direction)
        cases.append(case("compare", direction, *calls, *shapes))
    for direction in ("eq", "ne"):
        calls = [call(*pairs(d), direction=direction) for d in COMPLEX]
        cases.append(case("compare", f"{direction}-complex", *calls))
    calls = [call(random("bool", 2, 9), random(d, 2, 9), random(d, 2, 9, seed=1)) for d in ALL]
    leak = call(
        [True, False, True], np.array([1, np.nan, 2], "f4"), np.array([np.inf, 3, -0.0], "f4")
    )
    empty = call(random("bool", 0), random("f32", 0), random("f32", 0))
    cases.append(case("select", "all", *calls, leak, empty, call(True, 1.0, np.nan)))
    return cases


def _converting() -> list[OpCase]:
    cases = []
    far = np.array(
        [300, -300, 70000, -1e9, 1e9, 5e9, -5e9, 1e19, -1e19, 3e19, 2147483648, 0.1, 1 / 3]
    )
    for source in ALL:
        x = edges(source)
        if source in ("f32", "f64"):
            x = np.concatenate([x, cast(far, source)])
        # Complex to bool is no meaning that both frameworks have.
        targets = [t for t in ALL if not (source in COMPLEX and t == "bool")]
        cases.append(case("convert", source, *(call(x, dtype=named(t)) for t in targets)))
    shapes = [call(random("f32", *s), dtype=named("bf16")) for s in ((), (0, 2), (2, 1, 3))]
    cases.append(case("convert", "shapes", *shapes))
    calls = []
    for group in (
        ("i8", "u8", "f8e4m3fn", "f8e5m2"),
        ("i16", "u16", "f16", "bf16"),
        ("i32", "u32", "f32"),
        ("i64", "u64", "f64"),
    ):
        # An 8-bit NaN has many bit patterns, and which of them a backend holds is nowhere defined.
        calls += [
            call(edges(s)[: -1 if s in SMALL_FLOATS else None], dtype=named(t))
            for s in group
            for t in group
        ]
    cases.append(case("bitcast", "all", *calls))
    x = np.array([0.0, -0.0, 1, 1.0009765625, 1.001, -1.3, 65504, 65520, 1e5, 1e30, -1e38, 0.1])
    x = np.concatenate([x, [448, 500, 3.1415927, np.inf, -np.inf, np.nan]])
    calls = [
        call(cast(x, d), exponent_bits=e, mantissa_bits=m)
        for d in ("f32", "f64")
        for e, m in ((8, 7), (5, 10), (5, 2), (8, 23))
    ]
    cases.append(case("reduce_precision", "float", *calls))
    return cases


CASES = [*_unary(), *_binary(), *_choosing(), *_converting()]
