"""Elementwise ops against torch in f64, Python's numbers, and jax.lax."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from plait.core_ir.errors import TypeRuleError
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise
from plait.core_ir.ops.elementwise import (
    FAMILY,
    bitcast,
    compare,
    complex_,
    convert,
    int_div,
    nextafter,
    pow_,
    reduce_precision,
    rem,
    round_,
    select,
    shift_left,
    shift_right_arithmetic,
    shift_right_logical,
)
from plait.core_ir.types import DTYPES, DType, TensorType

OPS = {op.name: op for op in FAMILY}
FLOATS = ("f64", "f32", "f16", "bf16", "f8e4m3fn", "f8e5m2")
INTEGERS = tuple(name for name, d in DTYPES.items() if d.is_integer)
CLOSE = {"f64": 1e-12, "c128": 1e-12, "f32": 3e-6, "c64": 3e-6}
"""Relative tolerance; of the narrower floats: one step, since they are rounded once."""

NUMBERS = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, -2.5, 0.25, 3.25, -0.875, 6, 1e-3, -20, 100, 0.9375]
SPECIAL = [math.inf, -math.inf, math.nan]


def values(dtype: DType, numbers: Any = (*NUMBERS, *SPECIAL)) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.array(numbers).astype(dtype.numpy)


def assert_near(got: np.ndarray, exact: np.ndarray, dtype: DType) -> None:
    """`got` is `exact` (f64 or c128) rounded to the dtype, give or take its tolerance."""
    with np.errstate(all="ignore"):
        expected = exact.astype(dtype.numpy).astype(exact.dtype)
    step = CLOSE.get(dtype.name) or float(ml_dtypes.finfo(dtype.numpy).eps)
    tiny = float(ml_dtypes.finfo(dtype.numpy).smallest_subnormal)
    np.testing.assert_allclose(got.astype(exact.dtype), expected, rtol=step, atol=max(tiny, 1e-300))


TORCH_UNARY: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        *("neg", "abs", "sign", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
        *("atanh", "erf", "erfc", "lgamma", "floor", "ceil", "trunc", "digamma"),
    )
} | {
    "logistic": torch.sigmoid,
    "erf_inv": torch.erfinv,
    "sign": lambda x: torch.where(x.isnan(), x, x.sign()),  # torch says 0 of NaN
}
# torch and SciPy differ at poles and below -1e2 in digits that no dtype here keeps.
LIMITED = {
    "digamma": [0.5, 1, 1.5, 3.25, 6, 100, 0.0625, -0.5, -2.5, math.nan],
    "lgamma": [0.5, 1, 1.5, 3.25, 6, 100, 0.0625, -0.5, -2.5, 0.0, -1, math.inf, math.nan],
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", sorted(TORCH_UNARY))
def test_unary_of_floats_equals_torch(evaluate: Any, name: str, dtype: str) -> None:
    d = DTYPES[dtype]
    x = values(d, LIMITED.get(name, (*NUMBERS, *SPECIAL)))
    exact = TORCH_UNARY[name](torch.from_numpy(x.astype(np.float64))).numpy()
    if name in ("sin", "cos", "tan") and dtype == "f8e4m3fn":
        x, exact = x[np.isfinite(exact)], exact[np.isfinite(exact)]
    (got,) = evaluate(OPS[name], x)
    assert_near(got, exact, d)


@pytest.mark.parametrize("dtype", FLOATS)
def test_cbrt_is_the_real_root(evaluate: Any, dtype: str) -> None:
    d = DTYPES[dtype]
    x = values(d)
    exact = np.array([math.copysign(abs(v) ** (1 / 3), v) for v in x.astype(float)])
    assert_near(evaluate(OPS["cbrt"], x)[0], exact, d)


COMPLEX_UNARY = (
    *("neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos"),
    *("atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp2", "log2", "logistic"),
)


@pytest.mark.parametrize("dtype", ["c64", "c128"])
@pytest.mark.parametrize("name", COMPLEX_UNARY)
def test_unary_of_complex_numbers_equals_torch(evaluate: Any, name: str, dtype: str) -> None:
    d = DTYPES[dtype]
    parts = (0.5, -1.25, 2.0, -0.75)
    x = values(d, [complex(a, b) for a, b in product(parts, parts)])
    exact = TORCH_UNARY[name](torch.from_numpy(x.astype(np.complex128))).numpy()
    (got,) = evaluate(OPS[name], x)
    np.testing.assert_allclose(got, exact.astype(d.numpy), rtol=20 * CLOSE[dtype])


@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_parts_of_complex_numbers(evaluate: Any, dtype: str) -> None:
    x = values(DTYPES[dtype], [3 + 4j, -3 - 4j, 0, complex(0, math.inf), complex(math.nan, 1)])
    numbers = x.tolist()
    parts = {
        "real": [z.real for z in numbers],
        "imag": [z.imag for z in numbers],
        "conj": [z.conjugate() for z in numbers],
        "abs": [abs(z) for z in numbers],
        "is_finite": [math.isfinite(z.real) and math.isfinite(z.imag) for z in numbers],
    }
    for name, expected in parts.items():
        np.testing.assert_array_equal(evaluate(OPS[name], x)[0], expected)
    whole = evaluate(complex_, *(evaluate(OPS[n], x[:4])[0] for n in ("real", "imag")))[0]
    np.testing.assert_array_equal(whole.view(x.real.dtype), x[:4].view(x.real.dtype))
    (unit,) = evaluate(OPS["sign"], x[:3])
    np.testing.assert_allclose(unit, [0.6 + 0.8j, -0.6 - 0.8j, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_to_even_or_away_from_zero(evaluate: Any, dtype: str) -> None:
    numbers = [0.5, -0.5, 1.5, 2.5, -2.5, 2.25, -2.75, 3, 0.0, -0.0, *SPECIAL]
    x = values(DTYPES[dtype], numbers)
    (even,) = evaluate(round_, x, mode="half_even")
    (away,) = evaluate(round_, x, mode="half_away")
    finite = np.isfinite(x.astype(float))
    for got, expected in (
        (even, [0, -0.0, 2, 2, -2, 2, -3, 3, 0, -0.0]),
        (away, [1, -1, 2, 3, -3, 2, -3, 3, 0, -0.0]),
    ):
        np.testing.assert_array_equal(got.astype(float)[:10], expected)
        np.testing.assert_array_equal(np.signbit(got.astype(float)[:10]), np.signbit(expected))
        np.testing.assert_array_equal(got.astype(float)[~finite], x.astype(float)[~finite])


def test_round_half_away_below_one_half_is_zero(evaluate: Any) -> None:
    x = np.array([np.nextafter(0.5, 0), 2.0**52 + 1, -(2.0**53)])
    np.testing.assert_array_equal(evaluate(round_, x, mode="half_away")[0], [0, *x[1:]])


def python_binary(op: str) -> Callable[[float, float], float]:
    table: dict[str, Callable[[float, float], float]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "max": lambda x, y: math.nan if x != x or y != y else max(x, y),
        "min": lambda x, y: math.nan if x != x or y != y else min(x, y),
        "atan2": math.atan2,
    }
    return table[op]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "max", "min", "atan2"])
def test_binary_of_floats_equals_python(evaluate: Any, name: str, dtype: str) -> None:
    d = DTYPES[dtype]
    x, y = (np.array(v) for v in zip(*product(values(d), values(d)), strict=True))
    exact = np.array([python_binary(name)(float(a), float(b)) for a, b in zip(x, y, strict=True)])
    assert_near(evaluate(OPS[name], x, y)[0], exact, d)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["div", "pow", "rem dividend", "rem divisor"])
def test_div_pow_and_rem_of_floats_equal_torch(evaluate: Any, name: str, dtype: str) -> None:
    d = DTYPES[dtype]
    x, y = (np.array(v) for v in zip(*product(values(d), values(d)), strict=True))
    name, _, sign = name.partition(" ")
    functions = {
        "div": torch.div,
        "pow": torch.pow,
        "dividend": torch.fmod,
        "divisor": torch.remainder,
    }
    exact = functions[sign or name](*(torch.from_numpy(v.astype(float)) for v in (x, y))).numpy()
    attrs = {"sign": sign} if sign else {}
    assert_near(evaluate(OPS[name], x, y, **attrs)[0], exact, d)


def test_nextafter_equals_math(evaluate: Any) -> None:
    x, y = np.array(list(product([0.0, 1.0, -1.0, math.inf], repeat=2))).T
    expected = [math.nextafter(a, b) for a, b in zip(x, y, strict=True)]
    np.testing.assert_array_equal(evaluate(nextafter, x, y)[0], expected)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_binary_of_complex_numbers_equals_python(evaluate: Any, name: str) -> None:
    numbers = [1 + 2j, -0.5j, 3 - 1j]
    x, y = np.array(list(product(numbers, repeat=2))).T
    functions: dict[str, Callable[[complex, complex], complex]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
    }
    expected = [functions[name](a, b) for a, b in product(numbers, repeat=2)]
    np.testing.assert_allclose(evaluate(OPS[name], x, y)[0], expected, rtol=1e-15)


# Integers: every pair of 8-bit numbers, and the edges of the wider ones.


def wrapped(number: int, dtype: DType) -> int:
    bits = 8 * dtype.itemsize
    number %= 2**bits
    return number - 2**bits if dtype.kind == "signed" and number >= 2 ** (bits - 1) else number


def unsigned(number: int, dtype: DType) -> int:
    return number % 2 ** (8 * dtype.itemsize)


def truncated(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def by_python(name: str, x: int, y: int, d: DType) -> int:
    """The mathematical result; `wrapped` gives the op's."""
    bits = 8 * d.itemsize
    amount = unsigned(y, d)
    match name:
        case "add" | "sub" | "mul" | "and" | "or" | "xor":
            method = {"and": "__and__", "or": "__or__", "xor": "__xor__"}.get(name, f"__{name}__")
            return int(getattr(x, method)(y))
        case "max" | "min":
            return max(x, y) if name == "max" else min(x, y)
        case "trunc":
            return truncated(x, y) if y else -1
        case "floor":
            return x // y if y else -1
        case "dividend":
            return x - truncated(x, y) * y if y else x
        case "divisor":
            return x % y if y else x
        case "shift_left":
            return x << amount if amount < bits else 0
        case "shift_right_logical":
            return unsigned(x, d) >> amount
        case "shift_right_arithmetic":
            return x >> amount
    raise KeyError(name)


def integer_pairs(d: DType) -> tuple[np.ndarray, np.ndarray]:
    info = np.iinfo(d.numpy)
    if d.itemsize == 1:
        line = np.arange(info.min, info.max + 1).astype(d.numpy)
    else:
        small = [n for n in (-9, -2, -1, 0, 1, 2, 3, 7, 15, 16, 31, 32, 63, 64) if n >= info.min]
        line = np.array([info.min, info.min + 1, *small, info.max - 1, info.max], d.numpy)
    return np.repeat(line, len(line)), np.tile(line, len(line))


BINARY_INTEGER = {
    **{name: (OPS[name], {}) for name in ("add", "sub", "mul", "and", "or", "xor", "max", "min")},
    "trunc": (int_div, {"rounding": "trunc"}),
    "floor": (int_div, {"rounding": "floor"}),
    "dividend": (rem, {"sign": "dividend"}),
    "divisor": (rem, {"sign": "divisor"}),
    "shift_left": (shift_left, {}),
    "shift_right_logical": (shift_right_logical, {}),
    "shift_right_arithmetic": (shift_right_arithmetic, {}),
}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", sorted(BINARY_INTEGER))
def test_binary_of_integers_equals_python(evaluate: Any, name: str, dtype: str) -> None:
    d = DTYPES[dtype]
    op, attrs = BINARY_INTEGER[name]
    x, y = integer_pairs(d)
    expected = [
        wrapped(by_python(name, a, b, d), d) for a, b in zip(x.tolist(), y.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(evaluate(op, x, y, **attrs)[0], expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_pow_of_integers_wraps(evaluate: Any, dtype: str) -> None:
    d = DTYPES[dtype]
    bases = [n for n in (-3, -1, 0, 1, 2, 3, 7, 100) if n >= 0 or d.kind == "signed"]
    pairs = list(product(bases, (0, 1, 2, 5, 31, 64, 127)))
    x, y = np.array(pairs, d.numpy).T
    expected = [wrapped(a**b, d) for a, b in pairs]
    np.testing.assert_array_equal(evaluate(pow_, x, y)[0], expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_unary_of_integers_equals_python(evaluate: Any, dtype: str) -> None:
    d = DTYPES[dtype]
    x = np.unique(integer_pairs(d)[0])
    bits = 8 * d.itemsize
    expected: dict[str, Callable[[int], int]] = {
        "neg": lambda n: -n,
        "abs": abs,
        "sign": lambda n: (n > 0) - (n < 0),
        "not": lambda n: ~n,
        "population_count": lambda n: unsigned(n, d).bit_count(),
        "count_leading_zeros": lambda n: bits - unsigned(n, d).bit_length(),
    }
    for name, function in expected.items():
        want = [wrapped(function(n), d) for n in x.tolist()]
        np.testing.assert_array_equal(evaluate(OPS[name], x)[0], want, err_msg=name)


def test_logic_of_bools(evaluate: Any) -> None:
    x, y = np.array([False, False, True, True]), np.array([False, True, False, True])
    for name, expected in {"and": [0, 0, 0, 1], "or": [0, 1, 1, 1], "xor": [0, 1, 1, 0]}.items():
        np.testing.assert_array_equal(evaluate(OPS[name], x, y)[0], np.array(expected, bool))
    np.testing.assert_array_equal(evaluate(OPS["not"], x)[0], [True, True, False, False])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_compare_is_pythons(evaluate: Any, dtype: str) -> None:
    d = DTYPES[dtype]
    numbers: list[Any] = [0, 1, 3] if d.kind != "float" else [0.0, -0.0, 1, -2, *SPECIAL]
    if d.kind == "complex":
        numbers = [0, 1, 1j, complex(math.nan, 0)]
    x, y = (np.array(v) for v in zip(*product(values(d, numbers), repeat=2), strict=True))
    for direction in ("eq", "ne") if d.kind == "complex" else ("eq", "ne", "lt", "le", "gt", "ge"):
        method = f"__{direction}__"
        expected = [
            getattr(a, method)(b)
            for a, b in zip(*(v.astype(_wide(d)).tolist() for v in (x, y)), strict=True)
        ]
        np.testing.assert_array_equal(evaluate(compare, x, y, direction=direction)[0], expected)


def _wide(d: DType) -> Any:
    return np.float64 if d.kind == "float" else d.numpy


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_select_takes_either_bit_for_bit(evaluate: Any, dtype: str) -> None:
    d = DTYPES[dtype]
    x, y = values(d, [1, 0, 1]), values(d, [0, 1, 1])
    (got,) = evaluate(select, np.array([True, False, True]), x, y)
    assert got.tobytes() == np.array([x[0], y[1], x[2]], d.numpy).tobytes()


# convert, from every dtype to every dtype


def converted(number: Any, wanted: DType) -> Any:
    if wanted.kind == "bool":
        return number != 0
    if wanted.kind == "complex":
        return complex(number)
    if isinstance(number, complex):
        number = number.real
    if wanted.kind == "float":
        return float(number)
    info = np.iinfo(wanted.numpy)
    if isinstance(number, float):
        if math.isnan(number):
            return 0
        return info.min if number <= info.min else info.max if number >= info.max else int(number)
    return wrapped(int(number), wanted)


@pytest.mark.parametrize(("have", "wanted"), tuple(product(DTYPES, DTYPES)))
def test_convert_truncates_saturates_and_wraps(evaluate: Any, have: str, wanted: str) -> None:
    source, target = DTYPES[have], DTYPES[wanted]
    match source.kind:
        case "bool":
            x = np.array([False, True])
        case "float":
            x = values(source, [*NUMBERS, 300, -300, 3e9, -3e9, 1e19, -1e19, *SPECIAL])
        case "complex":
            x = values(source, [0, 1.5 - 2j, 2j, -3.5, 300 + 1j, 1e19, complex(math.nan, 1)])
        case _:
            x = np.unique(integer_pairs(source)[0])
    numbers = (x.astype(np.float64) if source.kind == "float" else x).tolist()
    with np.errstate(all="ignore"):
        expected = np.array(
            [converted(n, target) for n in numbers],
            dtype=None if target.is_inexact else target.numpy,
        )
        expected = expected.astype(target.numpy)
    (got,) = evaluate(convert, x, dtype=target)
    if target.is_inexact:
        step = 0 if source.kind == "float" else float(ml_dtypes.finfo(target.numpy).eps)
        wide = np.complex128 if target.kind == "complex" else np.float64
        np.testing.assert_allclose(got.astype(wide), expected.astype(wide), rtol=step)
    else:
        np.testing.assert_array_equal(got, expected)


def test_bitcast_keeps_the_bits(evaluate: Any) -> None:
    for a, b in product(DTYPES.values(), DTYPES.values()):
        if a.itemsize == b.itemsize and "bool" not in (a.kind, b.kind):
            x = values(a, [0, 1, 3])
            (got,) = evaluate(bitcast, x.reshape(3, 1)[::-1], dtype=b)
            assert got.tobytes() == x[::-1].tobytes()
    one = evaluate(bitcast, np.float32(1), dtype=DTYPES["u32"])[0]
    assert one == 0x3F800000


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("bits", [(8, 7), (5, 10), (5, 2), (4, 3), (8, 23), (2, 0), (11, 52)])
def test_reduce_precision_equals_jax(evaluate: Any, dtype: str, bits: tuple[int, int]) -> None:
    d = DTYPES[dtype]
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=200) * 2.0 ** rng.integers(-20, 20, 200)
    x = values(d, [*NUMBERS, *SPECIAL, *numbers, 65519, 65520, 2.0**-14, 2.0**-15])
    exponent_bits, mantissa_bits = bits
    with jax.enable_x64(True):
        expected = np.asarray(jax.lax.reduce_precision(x, exponent_bits, mantissa_bits))
    (got,) = evaluate(reduce_precision, x, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits)
    np.testing.assert_array_equal(got.astype(float), expected.astype(float))
    signs = [np.signbit(v.astype(float)) for v in (got, expected)]
    finite = ~np.isnan(x.astype(float))
    np.testing.assert_array_equal(signs[0][finite], signs[1][finite])


# Rules that all share.

ATTRS: dict[str, dict[str, Any]] = {
    "round": dict(mode="half_even"),
    "int_div": dict(rounding="floor"),
    "rem": dict(sign="divisor"),
    "compare": dict(direction="eq"),
    "reduce_precision": dict(exponent_bits=5, mantissa_bits=2),
}
SHARED = [op for op in FAMILY if op not in (select, convert, bitcast)]
DOMAINS = {
    "numbers (not bool)": ("signed", "unsigned", "float", "complex"),
    "real numbers": ("signed", "unsigned", "float"),
    "floating point or complex": ("float", "complex"),
    "floating point": ("float",),
    "integers": ("signed", "unsigned"),
    "bool or integers": ("bool", "signed", "unsigned"),
    "complex": ("complex",),
    "any dtype": ("bool", "signed", "unsigned", "float", "complex"),
}


@pytest.mark.parametrize("op", SHARED, ids=str)
def test_c1_operands_are_of_the_domain(op: Op) -> None:
    words = op.constraints[0].removeprefix("operands are ")
    for d in DTYPES.values():
        types = [TensorType(d, (2,))] * (op.num_operands or 0)
        allowed = d.name in ("f32", "f64") if words == "f32 or f64" else d.kind in DOMAINS[words]
        if allowed:
            (result,) = op.types(types, ATTRS.get(op.name, {}))
            assert result.shape == (2,)
        else:
            with pytest.raises(TypeRuleError, match=f"^{op.name}: C1: "):
                op.types(types, ATTRS.get(op.name, {}))


@pytest.mark.parametrize("op", [op for op in SHARED if op.num_operands == 2], ids=str)
def test_c2_operands_have_one_type(op: Op) -> None:
    d, other = next(
        (DTYPES[a], DTYPES[b])
        for a, b in (("f32", "f64"), ("i32", "i64"))
        if _accepts(op, TensorType(DTYPES[a], (2,)))
    )
    x = TensorType(d, (2,))
    for wrong in (x.with_shape(()), x.with_shape((3,)), x.with_shape((1, 2)), x.with_dtype(other)):
        with pytest.raises(TypeRuleError, match=f"^{op.name}: C2: "):
            op.types([x, wrong], ATTRS.get(op.name, {}))


def _accepts(op: Op, x: TensorType) -> bool:
    try:
        op.types([x] * (op.num_operands or 0), ATTRS.get(op.name, {}))
    except TypeRuleError:
        return False
    return True


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
@pytest.mark.parametrize("op", SHARED, ids=str)
def test_every_op_takes_any_shape(evaluate: Any, op: Op, shape: tuple[int, ...]) -> None:
    for d in DTYPES.values():
        if _accepts(op, TensorType(d, shape)):
            x = np.ones(shape, d.numpy)
            (got,) = evaluate(op, *[x] * (op.num_operands or 0), **ATTRS.get(op.name, {}))
            assert got.shape == shape


@pytest.mark.parametrize("op", [op for op in FAMILY if op.commutative], ids=str)
def test_commutative_ops_give_the_same_bits_either_way(evaluate: Any, op: Op) -> None:
    for d in DTYPES.values():
        if _accepts(op, TensorType(d, ())):
            numbers = [0, 1, 3] if not d.is_inexact else [0.0, -0.0, 1.5, -2]
            x, y = (
                np.array(v, d.numpy)
                for v in zip(*product(values(d, numbers), repeat=2), strict=True)
            )
            assert evaluate(op, x, y)[0].tobytes() == evaluate(op, y, x)[0].tobytes()


def test_compare_c3_complex_numbers_are_not_ordered(refuses: Any, accepts: Any) -> None:
    for direction in ("lt", "le", "gt", "ge"):
        refuses(compare, 3, "c64[2]", "c64[2]", direction=direction)
    accepts(compare, "c64[2]", "c64[2]", direction="eq")


def test_reduce_precision_c2_bits(refuses: Any) -> None:
    refuses(reduce_precision, 2, "f32[2]", exponent_bits=0, mantissa_bits=3)
    refuses(reduce_precision, 2, "f32[2]", exponent_bits=5, mantissa_bits=-1)


def test_select_c1_predicate(refuses: Any) -> None:
    refuses(select, 1, "i32[2]", "f32[2]", "f32[2]")
    refuses(select, 1, "bool[]", "f32[2]", "f32[2]")


def test_select_c2_alternatives_have_one_type(refuses: Any) -> None:
    refuses(select, 2, "bool[2]", "f32[2]", "f64[2]")
    refuses(select, 2, "bool[2]", "f32[2]", "f32[]")


def test_bitcast_c1_equal_sizes(refuses: Any) -> None:
    refuses(bitcast, 1, "f32[2]", dtype=DTYPES["u64"])


def test_flops_are_one_for_each_element() -> None:
    x = TensorType(DTYPES["f32"], (3, 4))
    assert elementwise.add.flops([x, x], {}, [x]) == 12
