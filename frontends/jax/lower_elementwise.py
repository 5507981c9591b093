"""Lowering rules: elementwise primitives and conversions."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ops
from plait.core_ir.types import DTYPES, bool_
from plait.frontends.jax.site import Rule, Site, key_rank, key_word, plain, spread


def _or_logical(op: Op, logical: Op) -> Rule:
    """`op`, or on bool, where it is not defined, the logical op of the same meaning."""

    def rule(b: Builder, site: Site, *operands: Value) -> Value:
        shape = site.result.shape
        chosen = logical if site.result.dtype == bool_ else op
        return b(chosen, *(spread(b, x, shape) for x in operands))

    return rule


def _mul(b: Builder, site: Site, x: Value, y: Value) -> Value:
    dtype, shape = site.result.dtype, site.result.shape
    x, y = (spread(b, b.convert(v, dtype), shape) for v in (x, y))
    return b(ops.mul, x, y)


def _div(b: Builder, site: Site, x: Value, y: Value) -> Value:
    x, y = (spread(b, v, site.result.shape) for v in (x, y))
    if site.result.dtype.is_integer:
        return b(ops.int_div, x, y, rounding="trunc")
    return b(ops.div, x, y)


def _pow(b: Builder, site: Site, x: Value, y: Value) -> Value:
    dtype, shape = site.result.dtype, site.result.shape
    return b(ops.pow_, *(spread(b, b.convert(v, dtype), shape) for v in (x, y)))


def _digamma(b: Builder, site: Site, x: Value) -> Value:
    # At the pole at zero JAX has NaN, as at the other poles; the op has an infinity.
    at_zero = b(ops.compare, x, b.full(x.type, 0), direction="eq")
    return b(ops.select, at_zero, b.full(x.type, math.nan), b(ops.digamma, x))


# JAX rounds each step of these formulas, which for 16-bit floats is some units in the last place off one rounding.


def _exp2(b: Builder, site: Site, x: Value) -> Value:
    if x.type.dtype.itemsize > 2:
        return b(ops.exp2, x)
    return b(ops.exp, b(ops.mul, x, b.full(x.type, math.log(2))))


def _logistic(b: Builder, site: Site, x: Value) -> Value:
    if x.type.dtype.itemsize > 2:
        return b(ops.logistic, x)
    one = b.full(x.type, 1)
    return b(ops.div, one, b(ops.add, one, b(ops.exp, b(ops.neg, x))))


def _square(b: Builder, site: Site, x: Value) -> Value:
    return b(ops.mul, x, x)


def _integer_pow(b: Builder, site: Site, x: Value) -> Value:
    exponent = int(site.params["y"])
    if exponent == 0:
        return b.full(x.type, 1)
    rest, power, result = abs(exponent), x, None
    while rest:
        if rest & 1:
            result = power if result is None else b(ops.mul, result, power)
        rest >>= 1
        if rest:
            power = b(ops.mul, power, power)
    assert result is not None
    return result if exponent > 0 else b(ops.div, b.full(x.type, 1), result)


def _compare(direction: str) -> Rule:
    return plain(ops.compare, direction=direction)


def _eq(direction: str) -> Rule:
    def rule(b: Builder, site: Site, x: Value, y: Value) -> Value:
        if not key_rank(site):
            return b(
                ops.compare, *(spread(b, v, site.result.shape) for v in (x, y)), direction=direction
            )
        shape = (*site.result.shape, 2)
        words = b(ops.compare, *(spread(b, v, shape) for v in (x, y)), direction=direction)
        halves = (key_word(b, words, i) for i in (0, 1))
        return b(ops.and_ if direction == "eq" else ops.or_, *halves)

    return rule


def _total_order(direction: str) -> Rule:
    """Comparison in the total order of floats: -NaN, -inf, ..., -0, +0, ..., inf, NaN."""

    def rule(b: Builder, site: Site, x: Value, y: Value) -> Value:
        x, y = (_ordered_bits(b, spread(b, v, site.result.shape)) for v in (x, y))
        return b(ops.compare, x, y, direction=direction)

    return rule


def _ordered_bits(b: Builder, x: Value) -> Value:
    """Signed integers in the total order of floats; other types as they are."""
    dtype = x.type.dtype
    if dtype.kind != "float":
        return x
    signed = DTYPES[f"i{8 * dtype.itemsize}"]
    bits = b(ops.bitcast, x, dtype=signed)
    sign = b(ops.shift_right_arithmetic, bits, b.full(bits.type, 8 * dtype.itemsize - 1))
    flipped = b(ops.and_, sign, b.full(bits.type, int(np.iinfo(f"i{dtype.itemsize}").max)))
    return b(ops.xor, bits, flipped)


def _select_n(b: Builder, site: Site, which: Value, *cases: Value) -> Value:
    shape = site.result.shape
    rank = which.type.rank
    which = b.expand(which, shape, range(rank)) if rank else spread(b, which, shape)
    if len(cases) == 1:
        return cases[0]
    if which.type.dtype == bool_:
        return b(ops.select, which, cases[1], cases[0])
    result = cases[-1]
    for index in reversed(range(len(cases) - 1)):
        chosen = b(ops.compare, which, b.full(which.type, index), direction="eq")
        result = b(ops.select, chosen, cases[index], result)
    return result


def _clamp(b: Builder, site: Site, low: Value, x: Value, high: Value) -> Value:
    low, high = (spread(b, v, x.type.shape) for v in (low, high))
    return b(ops.min_, b(ops.max_, x, low), high)


def _convert(b: Builder, site: Site, x: Value) -> Value:
    return b.convert(x, site.result.dtype)


def _bitcast(b: Builder, site: Site, x: Value) -> Value:
    return x if x.type == site.result else b(ops.bitcast, x, dtype=site.result.dtype)


def _conj(b: Builder, site: Site, x: Value) -> Value:
    return b(ops.conj, b.convert(x, site.result.dtype))


def _round(b: Builder, site: Site, x: Value) -> Value:
    # RoundingMethod: AWAY_FROM_ZERO is 0, TO_NEAREST_EVEN is 1.
    mode = "half_even" if int(site.params["rounding_method"]) else "half_away"
    return b(ops.round_, x, mode=mode)


def _reduce_precision(b: Builder, site: Site, x: Value) -> Value:
    p = site.params
    return b(
        ops.reduce_precision,
        x,
        exponent_bits=int(p["exponent_bits"]),
        mantissa_bits=int(p["mantissa_bits"]),
    )


def _identity(b: Builder, site: Site, x: Value) -> Value:
    return x


_PLAIN: Mapping[str, Op] = {
    "neg": ops.neg,
    "abs": ops.abs_,
    "sign": ops.sign,
    "exp": ops.exp,
    "expm1": ops.expm1,
    "log": ops.log,
    "log1p": ops.log1p,
    "sqrt": ops.sqrt,
    "rsqrt": ops.rsqrt,
    "cbrt": ops.cbrt,
    "sin": ops.sin,
    "cos": ops.cos,
    "tan": ops.tan,
    "asin": ops.asin,
    "acos": ops.acos,
    "atan": ops.atan,
    "sinh": ops.sinh,
    "cosh": ops.cosh,
    "tanh": ops.tanh,
    "asinh": ops.asinh,
    "acosh": ops.acosh,
    "atanh": ops.atanh,
    "erf": ops.erf,
    "erfc": ops.erfc,
    "erf_inv": ops.erf_inv,
    "lgamma": ops.lgamma,
    "floor": ops.floor,
    "ceil": ops.ceil,
    "not": ops.not_,
    "is_finite": ops.is_finite,
    "population_count": ops.population_count,
    "clz": ops.count_leading_zeros,
    "real": ops.real,
    "imag": ops.imag,
    "add": ops.add,
    "add_any": ops.add,
    "sub": ops.sub,
    "atan2": ops.atan2,
    "nextafter": ops.nextafter,
    "and": ops.and_,
    "or": ops.or_,
    "xor": ops.xor,
    "shift_left": ops.shift_left,
    "shift_right_logical": ops.shift_right_logical,
    "shift_right_arithmetic": ops.shift_right_arithmetic,
    "complex": ops.complex_,
}

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{name: plain(op) for name, op in _PLAIN.items()},
        **{name: _compare(name) for name in ("lt", "le", "gt", "ge")},
        **{name: _eq(name) for name in ("eq", "ne")},
        **{f"{name}_to": _total_order(name) for name in ("eq", "lt", "le")},
        "max": _or_logical(ops.max_, ops.or_),
        "min": _or_logical(ops.min_, ops.and_),
        "rem": plain(ops.rem, sign="dividend"),
        "mul": _mul,
        "div": _div,
        "pow": _pow,
        "digamma": _digamma,
        "exp2": _exp2,
        "logistic": _logistic,
        "square": _square,
        "integer_pow": _integer_pow,
        "select_n": _select_n,
        "clamp": _clamp,
        "convert_element_type": _convert,
        "bitcast_convert_type": _bitcast,
        "conj": _conj,
        "round": _round,
        "reduce_precision": _reduce_precision,
        "stop_gradient": _identity,
        "copy": _identity,
        "name": _identity,
    }
)
