"""Elementwise ops: operands of one type, one result of the same shape. Nothing is promoted or broadcast.

Arithmetic on 8- and 16-bit floats is done in f32 and rounded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import scipy.special

from plait.core_ir.errors import TypeRuleError
from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Op,
    Run,
    Types,
    choice_attr,
    dtype_attr,
    int_attr,
)
from plait.core_ir.types import DType, TensorType, bool_, c64, c128, dtype_of, f32, f64

Domain = tuple[str, Callable[[DType], bool]]

ANY: Domain = ("any dtype", lambda d: True)
NUMBER: Domain = ("numbers (not bool)", lambda d: d.kind != "bool")
REAL: Domain = ("real numbers", lambda d: d.kind in ("signed", "unsigned", "float"))
INEXACT: Domain = ("floating point or complex", lambda d: d.is_inexact)
FLOAT: Domain = ("floating point", lambda d: d.kind == "float")
INTEGER: Domain = ("integers", lambda d: d.is_integer)
BITS: Domain = ("bool or integers", lambda d: d.is_integer or d.kind == "bool")
COMPLEX: Domain = ("complex", lambda d: d.kind == "complex")
FLOAT32_64: Domain = ("f32 or f64", lambda d: d in (f32, f64))

_PART = {c64: f32, c128: f64}
_WHOLE = {f32: c64, f64: c128}


def _same(dtype: DType) -> DType:
    return dtype


def _part(dtype: DType) -> DType:
    return _PART.get(dtype, dtype)


def _elementwise(
    name: str,
    num_operands: int,
    domain: Domain,
    function: Callable[..., Any],
    doc: str,
    *,
    result: Callable[[DType], DType] = _same,
    attrs: tuple[Attr, ...] = (),
    commutative: bool = False,
) -> Op:
    """An op whose operands all have one type. `function(*operands, **attrs)` is its meaning in NumPy."""
    words, allowed = domain
    constraints = (f"operands are {words}", "operands have one type")

    def infer(types: Types, _: Attrs) -> tuple[TensorType, ...]:
        first = types[0]
        if not allowed(first.dtype):
            raise TypeRuleError(f"{name}: C1: {constraints[0]}; got {first}")
        for other in types[1:]:
            if other is not first and other != first:
                raise TypeRuleError(f"{name}: C2: {constraints[1]}; got {first} and {other}")
        wanted = result(first.dtype)
        return (first if wanted is first.dtype else first.with_dtype(wanted),)

    def evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
        first = operands[0]
        dtype = dtype_of(first.dtype)
        narrow = dtype.kind == "float" and dtype.itemsize <= 2
        with np.errstate(all="ignore"):
            wide = [x.astype(np.float32) for x in operands] if narrow else operands
            out = np.asarray(function(*wide, **attrs))
            return (out.astype(result(dtype).numpy, copy=False),)

    taken = constraints[: min(num_operands, 2)]
    return Op(name, infer, evaluate, num_operands, attrs, taken, commutative=commutative, doc=doc)


def _unary(
    name: str, domain: Domain, function: Callable[..., Any], doc: str = "", **more: Any
) -> Op:
    return _elementwise(name, 1, domain, function, doc, **more)


def _binary(
    name: str, domain: Domain, function: Callable[..., Any], doc: str = "", **more: Any
) -> Op:
    return _elementwise(name, 2, domain, function, doc, **more)


# Meanings that NumPy does not give in one call.


def _logistic(x: Array) -> Array:
    return np.asarray(scipy.special.expit(x)) if x.dtype.kind == "f" else 1 / (1 + np.exp(-x))


def _rsqrt(x: Array) -> Array:
    return np.asarray(x.dtype.type(1) / np.sqrt(x))


def _sign(x: Array) -> Array:
    if x.dtype.kind != "c":
        return np.asarray(np.sign(x))
    size = np.abs(x)
    return np.where(size == 0, 0, x / np.where(size == 0, 1, size))


def _round(x: Array, mode: str) -> Array:
    if mode == "half_even":
        return np.asarray(np.rint(x))
    whole = np.trunc(x)
    return np.asarray(
        np.copysign(np.where(np.abs(x - whole) >= 0.5, np.abs(whole) + 1, np.abs(whole)), x)
    )


def _int_div(x: Array, y: Array, rounding: str) -> Array:
    safe = np.where(y == 0, 1, y).astype(x.dtype)
    quotient = np.floor_divide(x, safe)
    if rounding == "trunc" and x.dtype.kind == "i":
        inexact = (quotient * safe != x) & ((x < 0) != (safe < 0))
        quotient = quotient + inexact.astype(x.dtype)
    overflow = (x == np.iinfo(x.dtype).min) & (y == -1) if x.dtype.kind == "i" else False
    quotient = np.where(overflow, x, quotient)
    return np.where(y == 0, np.asarray(-1).astype(x.dtype), quotient)


def _rem(x: Array, y: Array, sign: str) -> Array:
    function = np.fmod if sign == "dividend" else np.mod
    if x.dtype.kind == "f":
        return np.asarray(function(x, y))
    return np.where(y == 0, x, function(x, np.where(y == 0, 1, y).astype(x.dtype)))


def _integer_power(x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        return np.asarray(np.power(x, y))
    result, base, exponent = np.ones_like(x), x.copy(), y.copy()
    while np.any(exponent > 0):
        result = np.where((exponent > 0) & (exponent & 1 == 1), result * base, result)
        base, exponent = base * base, exponent >> 1
    return result


def _shift(kind: str) -> Callable[[Array, Array], Array]:
    def apply(x: Array, amount: Array) -> Array:
        bits = x.dtype.itemsize * 8
        unsigned = np.dtype(f"u{x.dtype.itemsize}")
        wide = amount.view(unsigned) >= bits
        safe = np.where(wide, 0, amount).astype(x.dtype)
        if kind == "left":
            return np.where(wide, 0, np.left_shift(x, safe)).astype(x.dtype)
        if kind == "logical":
            return (
                np.where(wide, 0, np.right_shift(x.view(unsigned), safe.view(unsigned)))
                .astype(unsigned)
                .view(x.dtype)
            )
        filled = np.right_shift(x, np.asarray(bits - 1, x.dtype)) if x.dtype.kind == "i" else 0
        return np.where(wide, filled, np.right_shift(x, safe)).astype(x.dtype)

    return apply


def _population_count(x: Array) -> Array:
    return np.asarray(np.bitwise_count(x.view(np.dtype(f"u{x.dtype.itemsize}")))).astype(x.dtype)


def _count_leading_zeros(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    rest, count = x.view(np.dtype(f"u{x.dtype.itemsize}")), np.zeros(x.shape, np.int64)
    for bit in range(bits):
        count += rest >> rest.dtype.type(bit) == 0
    return count.astype(x.dtype)


def _complex(x: Array, y: Array) -> Array:
    whole = np.empty(x.shape, _WHOLE[dtype_of(x.dtype)].numpy)
    whole.real, whole.imag = x, y
    return whole


neg = _unary("neg", NUMBER, np.negative, "-x; integers wrap.")
sign = _unary("sign", NUMBER, _sign, "-1, 0 or 1 (complex: x / |x|); NaN stays.")
exp = _unary("exp", INEXACT, np.exp)
exp2 = _unary("exp2", INEXACT, lambda x: np.exp2(x) if x.dtype.kind == "f" else 2**x)
expm1 = _unary("expm1", INEXACT, np.expm1)
log = _unary("log", INEXACT, np.log, "Natural logarithm.")
log1p = _unary("log1p", INEXACT, np.log1p)
log2 = _unary("log2", INEXACT, np.log2)
sqrt = _unary("sqrt", INEXACT, np.sqrt)
rsqrt = _unary("rsqrt", INEXACT, _rsqrt, "1 / sqrt(x).")
cbrt = _unary("cbrt", FLOAT, np.cbrt)
sin = _unary("sin", INEXACT, np.sin)
cos = _unary("cos", INEXACT, np.cos)
tan = _unary("tan", INEXACT, np.tan)
asin = _unary("asin", INEXACT, np.arcsin)
acos = _unary("acos", INEXACT, np.arccos)
atan = _unary("atan", INEXACT, np.arctan)
sinh = _unary("sinh", INEXACT, np.sinh)
cosh = _unary("cosh", INEXACT, np.cosh)
tanh = _unary("tanh", INEXACT, np.tanh)
asinh = _unary("asinh", INEXACT, np.arcsinh)
acosh = _unary("acosh", INEXACT, np.arccosh)
atanh = _unary("atanh", INEXACT, np.arctanh)
logistic = _unary("logistic", INEXACT, _logistic, "1 / (1 + exp(-x)).")
erf = _unary("erf", FLOAT, scipy.special.erf)
erfc = _unary("erfc", FLOAT, scipy.special.erfc)
erf_inv = _unary("erf_inv", FLOAT, scipy.special.erfinv)
lgamma = _unary(
    "lgamma",
    FLOAT,
    lambda x: np.where(np.isneginf(x), -x, scipy.special.gammaln(x)),
    "log |gamma(x)|; inf at the poles and at both infinities.",
)
digamma = _unary("digamma", FLOAT, scipy.special.digamma)
floor = _unary("floor", FLOAT, np.floor)
ceil = _unary("ceil", FLOAT, np.ceil)
trunc = _unary("trunc", FLOAT, np.trunc)
round_ = _unary(
    "round",
    FLOAT,
    _round,
    "To the nearest whole number; halves to even, or away from zero.",
    attrs=(choice_attr("mode", "half_even", "half_away"),),
)
not_ = _unary("not", BITS, np.invert, "Bitwise complement; logical for bool.")
is_finite = _unary("is_finite", INEXACT, np.isfinite, result=lambda d: bool_)
population_count = _unary("population_count", INTEGER, _population_count, "Number of set bits.")
count_leading_zeros = _unary("count_leading_zeros", INTEGER, _count_leading_zeros)
abs_ = _unary("abs", NUMBER, np.abs, "|x|; a complex number gives its real modulus.", result=_part)
real = _unary("real", COMPLEX, np.real, result=_part)
imag = _unary("imag", COMPLEX, np.imag, result=_part)
conj = _unary("conj", COMPLEX, np.conj)

add = _binary("add", NUMBER, np.add, "x + y; integers wrap.", commutative=True)
sub = _binary("sub", NUMBER, np.subtract, "x - y; integers wrap.")
mul = _binary("mul", NUMBER, np.multiply, "x * y; integers wrap.", commutative=True)
div = _binary("div", INEXACT, np.divide, "x / y.")
int_div = _binary(
    "int_div",
    INTEGER,
    _int_div,
    "x / y rounded to zero or down; by zero all bits are set (-1); MIN / -1 is MIN.",
    attrs=(choice_attr("rounding", "trunc", "floor"),),
)
rem = _binary(
    "rem",
    REAL,
    _rem,
    "Remainder with the sign of the dividend or of the divisor; an integer x rem 0 is x.",
    attrs=(choice_attr("sign", "dividend", "divisor"),),
)
pow_ = _binary("pow", NUMBER, _integer_power, "x ** y; integer exponents below zero give 1.")
atan2 = _binary("atan2", FLOAT, np.arctan2)
nextafter = _binary("nextafter", FLOAT32_64, np.nextafter)
max_ = _binary("max", NUMBER, np.maximum, "The larger; NaN if either is NaN.")
min_ = _binary("min", NUMBER, np.minimum, "The smaller; NaN if either is NaN.")
and_ = _binary("and", BITS, np.bitwise_and, commutative=True)
or_ = _binary("or", BITS, np.bitwise_or, commutative=True)
xor = _binary("xor", BITS, np.bitwise_xor, commutative=True)
shift_left = _binary("shift_left", INTEGER, _shift("left"), "By >= the width in bits: 0.")
shift_right_logical = _binary(
    "shift_right_logical", INTEGER, _shift("logical"), "Fills with zeros; by >= the width: 0."
)
shift_right_arithmetic = _binary(
    "shift_right_arithmetic", INTEGER, _shift("arithmetic"), "Fills with the sign bit."
)
complex_ = _binary(
    "complex",
    FLOAT32_64,
    _complex,
    "The complex number x + iy.",
    result=lambda d: _WHOLE[d],
)


_COMPARE: dict[str, Callable[[Array, Array], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_compare = _binary(
    "compare",
    ANY,
    lambda x, y, direction: _COMPARE[direction](x, y),
    "bool; IEEE: with NaN only `ne` holds.",
    result=lambda d: bool_,
    attrs=(choice_attr("direction", *_COMPARE),),
)


def _compare_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    result = _compare.infer(types, attrs)
    ordered = types[0].dtype.kind != "complex"
    compare.require(3, ordered or attrs["direction"] in ("eq", "ne"), attrs["direction"])
    return result


compare = replace(
    _compare,
    infer=_compare_infer,
    constraints=(*_compare.constraints, "complex numbers have directions eq and ne only"),
)


def _select_infer(types: Types, _: Attrs) -> tuple[TensorType, ...]:
    pred, on_true, on_false = types
    select.require(1, pred == on_true.with_dtype(bool_), f"{pred} for {on_true}")
    select.require(2, on_true == on_false, f"{on_true} and {on_false}")
    return (on_true,)


select = Op(
    "select",
    _select_infer,
    lambda operands, _, __: (np.where(operands[0], operands[1], operands[2]),),
    3,
    constraints=(
        "the predicate is bool and has the shape of the alternatives",
        "the alternatives have one type",
    ),
    doc="on_true where pred, else on_false; select(pred, on_true, on_false).",
)


def _convert(x: Array, wanted: DType) -> Array:
    have = dtype_of(x.dtype)
    if have == wanted:
        return x
    if wanted == bool_:
        return np.asarray(x != x.dtype.type(0))
    if have.kind == "complex" and wanted.kind != "complex":
        x = x.real
        have = _PART[have]
    if have.kind == "float" and wanted.is_integer:
        wide = x.astype(np.float64)
        info = np.iinfo(str(wanted.numpy))
        inside = np.clip(np.where(np.isnan(wide), 0, wide), float(info.min), float(info.max))
        out = np.trunc(inside)
        # float(info.max) of the 64-bit types rounds up to 2**63 or 2**64, which does not fit back.
        top = out >= float(info.max)
        return np.where(top, info.max, np.where(top, 0, out).astype(wanted.numpy)).astype(
            wanted.numpy
        )
    return x.astype(wanted.numpy)


def _convert_evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
    with np.errstate(all="ignore"):
        return (_convert(operands[0], attrs["dtype"]),)


convert = Op(
    "convert",
    lambda types, attrs: (types[0].with_dtype(attrs["dtype"]),),
    _convert_evaluate,
    1,
    (dtype_attr(),),
    doc="To another dtype. Float to integer truncates to zero, saturates, NaN gives 0; to bool is "
    "!= 0; complex to real drops the imaginary part; integers wrap.",
)


def _bitcast_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    dtype = attrs["dtype"]
    bitcast.require(1, types[0].dtype.itemsize == dtype.itemsize, f"{types[0].dtype} to {dtype}")
    return (types[0].with_dtype(dtype),)


bitcast = Op(
    "bitcast",
    _bitcast_infer,
    lambda operands, attrs, _: (
        np.ascontiguousarray(operands[0]).view(attrs["dtype"].numpy).reshape(operands[0].shape),
    ),
    1,
    (dtype_attr(),),
    ("both dtypes have one size in bytes",),
    movement=True,
    doc="The same bits read as another dtype.",
)


def _reduce_precision(x: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """Round the mantissa to nearest even, then the exponent: inf beyond its range, 0 below it."""
    size = 8 * x.dtype.itemsize
    mantissa = ml_dtypes.finfo(x.dtype).nmant  # type: ignore[no-untyped-call]
    out = x
    if mantissa_bits < mantissa:
        bits = np.dtype(f"u{x.dtype.itemsize}").type
        raw, drop = x.view(bits), mantissa - mantissa_bits
        odd = (raw >> bits(drop)) & bits(1)
        raw = (raw + bits((1 << (drop - 1)) - 1) + odd) & bits((1 << size) - (1 << drop))
        out = raw.view(x.dtype)
    if exponent_bits < size - 1 - mantissa:
        bias = (1 << (exponent_bits - 1)) - 1
        wide = out.astype(np.float64)
        _, power = np.frexp(np.where(np.isfinite(wide), wide, 1))
        wide = np.where(power - 1 > bias, np.copysign(np.inf, wide), wide)
        out = np.where(power - 1 < 1 - bias, np.copysign(0.0, wide), wide).astype(x.dtype)
    return np.where(np.isfinite(x), out, x)


def _reduce_precision_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    reduce_precision.require(1, types[0].dtype.kind == "float", types[0])
    enough = attrs["exponent_bits"] >= 1 and attrs["mantissa_bits"] >= 0
    reduce_precision.require(2, enough, dict(attrs))
    return (types[0],)


def _reduce_precision_evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
    with np.errstate(all="ignore"):
        return (_reduce_precision(operands[0], attrs["exponent_bits"], attrs["mantissa_bits"]),)


reduce_precision = Op(
    "reduce_precision",
    _reduce_precision_infer,
    _reduce_precision_evaluate,
    1,
    (int_attr("exponent_bits"), int_attr("mantissa_bits")),
    ("operands are floating point", "exponent_bits is at least 1, mantissa_bits at least 0"),
    doc="Rounded to a float of fewer bits, in its own dtype; with fewer exponent bits, what is "
    "below their least normal number becomes zero.",
)

FAMILY: tuple[Op, ...] = (
    *(neg, sign, exp, exp2, expm1, log, log1p, log2, sqrt, rsqrt, cbrt, sin, cos, tan, asin, acos),
    *(atan, sinh, cosh, tanh, asinh, acosh, atanh, logistic, erf, erfc, erf_inv, lgamma, digamma),
    *(floor, ceil, trunc, round_, not_, is_finite, population_count, count_leading_zeros, abs_),
    *(real, imag, conj, add, sub, mul, div, int_div, rem, pow_, atan2, nextafter, max_, min_, and_),
    *(or_, xor, shift_left, shift_right_logical, shift_right_arithmetic, complex_, compare, select),
    *(convert, bitcast, reduce_precision),
)
