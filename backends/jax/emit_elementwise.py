"""Emitters of the elementwise ops."""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from plait.backends.jax.rule import Table, cast, one, wide
from plait.core_ir.ops import elementwise as ops
from plait.core_ir.types import DType, bool_, c64, dtype_of, u8, u32, u64

Unary = Callable[[jax.Array], jax.Array]
Binary = Callable[[jax.Array, jax.Array], jax.Array]


def _like(x: jax.Array, number: complex) -> jax.Array:
    return lax.full_like(x, number)


def _is_signed(x: jax.Array) -> bool:
    return dtype_of(x.dtype).kind == "signed"


def _is_integer(x: jax.Array) -> bool:
    return dtype_of(x.dtype).is_integer


def _abs(x: jax.Array) -> jax.Array:
    return x if dtype_of(x.dtype).kind == "unsigned" else lax.abs(x)


def _log2(x: jax.Array) -> jax.Array:
    return lax.div(lax.log(x), _like(x, math.log(2)))


def _trunc(x: jax.Array) -> jax.Array:
    return lax.select(lax.lt(x, _like(x, 0)), lax.ceil(x), lax.floor(x))


def _both_sides(function: Unary) -> Unary:
    """A function with f(conj x) = conj f(x): XLA's take one side of a cut along the real axis, whatever the sign of
    a zero imaginary part."""

    def apply(x: jax.Array) -> jax.Array:
        if dtype_of(x.dtype).kind != "complex":
            return function(x)
        part = lax.imag(x)
        bits = lax.bitcast_convert_type(part, np.dtype(f"i{part.dtype.itemsize}"))
        below = lax.lt(bits, lax.full_like(bits, 0))
        out = function(lax.complex(lax.real(x), lax.abs(part)))
        return lax.select(below, lax.conj(out), out)

    return apply


_asin = _both_sides(lax.asin)


def _asinh(x: jax.Array) -> jax.Array:
    if dtype_of(x.dtype).kind != "complex":
        return lax.asinh(x)
    # asinh(x) is i asin(-i x), which carries over the side of the cut along the imaginary axis.
    turned = _asin(lax.complex(lax.imag(x), lax.neg(lax.real(x))))
    return lax.complex(lax.neg(lax.imag(turned)), lax.real(turned))


def _round(x: jax.Array, *, mode: str) -> jax.Array:
    method = lax.RoundingMethod
    return lax.round(x, method.TO_NEAREST_EVEN if mode == "half_even" else method.AWAY_FROM_ZERO)


def _is_finite(x: jax.Array) -> jax.Array:
    if dtype_of(x.dtype).kind == "complex":
        return lax.bitwise_and(lax.is_finite(lax.real(x)), lax.is_finite(lax.imag(x)))
    return lax.is_finite(x)


# Integer division: XLA leaves division by zero and MIN / -1 to the platform, so neither reaches it.


def _safe_divisor(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether y is zero, and y with 1 in place of what may not be divided by (MIN / 1 is what MIN / -1 is)."""
    is_zero = unsafe = lax.eq(y, _like(y, 0))
    if _is_signed(x):
        least = lax.eq(x, _like(x, int(np.iinfo(x.dtype).min)))
        unsafe = lax.bitwise_or(unsafe, lax.bitwise_and(least, lax.eq(y, _like(y, -1))))
    return is_zero, lax.select(unsafe, _like(y, 1), y)


def _signs_differ(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.ne(lax.lt(x, _like(x, 0)), lax.lt(y, _like(y, 0)))


def _int_div(x: jax.Array, y: jax.Array, *, rounding: str) -> jax.Array:
    is_zero, safe = _safe_divisor(x, y)
    quotient = lax.div(x, safe)
    if rounding == "floor" and _is_signed(x):
        inexact = lax.ne(lax.rem(x, safe), _like(x, 0))
        down = lax.bitwise_and(inexact, _signs_differ(x, safe))
        quotient = lax.sub(quotient, cast(down, x.dtype))
    return lax.select(is_zero, lax.bitwise_not(_like(x, 0)), quotient)


def _int_rem(x: jax.Array, y: jax.Array, sign: str) -> jax.Array:
    is_zero, safe = _safe_divisor(x, y)
    remainder = lax.rem(x, safe)
    if sign == "divisor" and _is_signed(x):
        inexact = lax.ne(remainder, _like(x, 0))
        other = lax.bitwise_and(inexact, _signs_differ(remainder, safe))
        remainder = lax.select(other, lax.add(remainder, safe), remainder)
    return lax.select(is_zero, x, remainder)


def _float_rem(x: jax.Array, y: jax.Array, sign: str) -> jax.Array:
    remainder = lax.rem(x, y)
    if sign == "dividend":
        return remainder
    zero = _like(x, 0)
    moved = lax.select(_signs_differ(remainder, y), lax.add(remainder, y), remainder)
    signed_zero = lax.select(lax.lt(y, zero), lax.neg(zero), zero)
    return lax.select(lax.eq(remainder, zero), signed_zero, moved)


def _rem(x: jax.Array, y: jax.Array, *, sign: str) -> jax.Array:
    return _int_rem(x, y, sign) if _is_integer(x) else _float_rem(x, y, sign)


def _pow(x: jax.Array, y: jax.Array) -> jax.Array:
    if not _is_integer(x):
        return lax.pow(x, y)
    one_, zero = _like(x, 1), _like(y, 0)

    def square(
        _: int, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        result, base, exponent = state
        odd = lax.ne(lax.bitwise_and(exponent, one_), zero)
        result = lax.select(odd, lax.mul(result, base), result)
        return result, lax.mul(base, base), lax.shift_right_logical(exponent, one_)

    bits = x.dtype.itemsize * 8
    start = (one_, x, lax.max(y, zero))
    result, _, _ = lax.fori_loop(0, bits, square, start)
    return jax.numpy.asarray(result)


def _shift_right_arithmetic(x: jax.Array, amount: jax.Array) -> jax.Array:
    # Unsigned numbers have no sign to fill with.
    shift = lax.shift_right_arithmetic if _is_signed(x) else lax.shift_right_logical
    return shift(x, amount)


_COMPARE: dict[str, Binary] = {
    "eq": lax.eq,
    "ne": lax.ne,
    "lt": lax.lt,
    "le": lax.le,
    "gt": lax.gt,
    "ge": lax.ge,
}


def _compare(x: jax.Array, y: jax.Array, *, direction: str) -> jax.Array:
    return _COMPARE[direction](x, y)


def convert(x: jax.Array, *, dtype: DType) -> jax.Array:
    """To another dtype as the op `convert` means it: saturating from float to integer, NaN gives 0."""
    have = dtype_of(x.dtype)
    if have == dtype:
        return x
    if dtype == bool_:
        return lax.ne(x, _like(x, 0))
    if have.kind == "complex" and dtype.kind != "complex":
        x = lax.real(x)
        have = dtype_of(x.dtype)
    if have.kind != "float" or not dtype.is_integer:
        return lax.convert_element_type(x, dtype.numpy)
    x = cast(x, np.dtype(np.float32)) if have.itemsize <= 2 else x
    info = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    whole = lax.select(lax.ne(x, x), _like(x, 0), x)
    # The bounds are exact powers of two, or round up to one: reached means out of range.
    low, high = lax.le(whole, _like(x, float(info.min))), lax.ge(whole, _like(x, float(info.max)))
    inside = lax.select(lax.bitwise_or(low, high), _like(x, 0), whole)
    out = lax.convert_element_type(inside, dtype.numpy)
    return lax.select(low, _like(out, info.min), lax.select(high, _like(out, info.max), out))


def _bitcast(x: jax.Array, *, dtype: DType) -> jax.Array:
    have = dtype_of(x.dtype)
    if have == dtype:
        return x
    if have == bool_:
        return _bitcast(lax.convert_element_type(x, np.uint8), dtype=dtype)
    if dtype == bool_:
        return lax.ne(_bitcast(x, dtype=u8), np.uint8(0))
    if have == c64:
        low, high = (cast(_bitcast(part(x), dtype=u32), u64) for part in (lax.real, lax.imag))
        return _bitcast(lax.bitwise_or(low, lax.shift_left(high, _like(high, 32))), dtype=dtype)
    if dtype == c64:
        bits = _bitcast(x, dtype=u64)
        low, high = bits, lax.shift_right_logical(bits, _like(bits, 32))
        parts = (lax.bitcast_convert_type(cast(b, u32), np.float32) for b in (low, high))
        return lax.complex(*parts)
    return lax.bitcast_convert_type(x, dtype.numpy)


TABLE: Table = {
    ops.neg: one(wide(lax.neg)),
    ops.sign: one(wide(lax.sign)),
    ops.exp: one(wide(lax.exp)),
    ops.exp2: one(wide(lax.exp2)),
    ops.expm1: one(wide(lax.expm1)),
    ops.log: one(wide(lax.log)),
    ops.log1p: one(wide(lax.log1p)),
    ops.log2: one(wide(_log2)),
    ops.sqrt: one(wide(_both_sides(lax.sqrt))),
    ops.rsqrt: one(wide(lax.rsqrt)),
    ops.cbrt: one(wide(lax.cbrt)),
    ops.sin: one(wide(lax.sin)),
    ops.cos: one(wide(lax.cos)),
    ops.tan: one(wide(lax.tan)),
    ops.asin: one(wide(_asin)),
    ops.acos: one(wide(_both_sides(lax.acos))),
    ops.atan: one(wide(lax.atan)),
    ops.sinh: one(wide(lax.sinh)),
    ops.cosh: one(wide(lax.cosh)),
    ops.tanh: one(wide(lax.tanh)),
    ops.asinh: one(wide(_asinh)),
    ops.acosh: one(wide(_both_sides(lax.acosh))),
    ops.atanh: one(wide(lax.atanh)),
    ops.logistic: one(wide(lax.logistic)),
    ops.erf: one(wide(lax.erf)),
    ops.erfc: one(wide(lax.erfc)),
    ops.erf_inv: one(wide(lax.erf_inv)),
    ops.lgamma: one(wide(lax.lgamma)),
    ops.digamma: one(wide(lax.digamma)),
    ops.floor: one(wide(lax.floor)),
    ops.ceil: one(wide(lax.ceil)),
    ops.trunc: one(wide(_trunc)),
    ops.round_: one(wide(_round)),
    ops.not_: one(lax.bitwise_not),
    ops.is_finite: one(wide(_is_finite)),
    ops.population_count: one(lax.population_count),
    ops.count_leading_zeros: one(lax.clz),
    ops.abs_: one(wide(_abs)),
    ops.real: one(lax.real),
    ops.imag: one(lax.imag),
    ops.conj: one(lax.conj),
    ops.add: one(wide(lax.add)),
    ops.sub: one(wide(lax.sub)),
    ops.mul: one(wide(lax.mul)),
    ops.div: one(wide(lax.div)),
    ops.int_div: one(_int_div),
    ops.rem: one(wide(_rem)),
    ops.pow_: one(wide(_pow)),
    ops.atan2: one(wide(lax.atan2)),
    ops.nextafter: one(lax.nextafter),
    ops.max_: one(wide(lax.max)),
    ops.min_: one(wide(lax.min)),
    ops.and_: one(lax.bitwise_and),
    ops.or_: one(lax.bitwise_or),
    ops.xor: one(lax.bitwise_xor),
    ops.shift_left: one(lax.shift_left),
    ops.shift_right_logical: one(lax.shift_right_logical),
    ops.shift_right_arithmetic: one(_shift_right_arithmetic),
    ops.complex_: one(lax.complex),
    ops.compare: one(wide(_compare)),
    ops.select: one(lax.select),
    ops.convert: one(convert),
    ops.bitcast: one(_bitcast),
    ops.reduce_precision: one(wide(lax.reduce_precision)),
}
