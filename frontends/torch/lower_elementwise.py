"""Lowering of elementwise ops: functions of one tensor, comparison, logic, selection, conversion."""

import math
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.types import TensorType, bool_, i8, i16, i32, i64
from plait.frontends.torch.dtypes import FROM_TORCH
from plait.frontends.torch.rules import (
    Operand,
    PlainRule,
    Rules,
    Site,
    common_type,
    in_compute_dtype,
)

aten = torch.ops.aten
_SIGNED = {1: i8, 2: i16, 4: i32, 8: i64}


def _unary(op: Op) -> PlainRule:
    def rule(s: Site, x: Value) -> Value:
        return s(op, s.b.convert(x, s.type.dtype))

    return rule


def _comparison(direction: str) -> PlainRule:
    def rule(s: Site, x: Operand, y: Operand) -> Value:
        type = common_type(x, y)
        return s(ew.compare, s.like(x, type), s.like(y, type), direction=direction)

    return rule


def _logical(op: Op) -> PlainRule:
    def rule(s: Site, x: Value, y: Operand) -> Value:
        return s(op, *(s.like(_truth(s, v), s.type) for v in (x, y)))

    return rule


def _truth(s: Site, x: Operand) -> Operand:
    return s.b.convert(x, bool_) if isinstance(x, Value) else bool(x)


def logical_not(s: Site, x: Value) -> Value:
    return s(ew.not_, s.b.convert(x, bool_))


def _bitwise(op: Op) -> PlainRule:
    def rule(s: Site, x: Operand, y: Operand) -> Value:
        return s(op, *s.operands(x, y))

    return rule


@in_compute_dtype
def log10(s: Site, x: Value) -> Value:
    return s.div(s(ew.log, s.b.convert(x, s.type.dtype)), math.log(10))


def frac(s: Site, x: Value) -> Value:
    return s(ew.sub, x, s(ew.trunc, x))


def whole(op: Op) -> PlainRule:
    """floor, ceil, trunc, round: integers stay as they are."""

    def rule(s: Site, x: Value) -> Value:
        if not x.type.dtype.is_inexact:
            return x
        return s(op, x, **({"mode": "half_even"} if op is ew.round_ else {}))

    return rule


@in_compute_dtype
def round_decimals(s: Site, x: Value, *, decimals: int) -> Value:
    if decimals == 0:
        return s(ew.round_, x, mode="half_even")
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return s.div(s(ew.round_, s.mul(x, scale), mode="half_even"), scale)
    return s.mul(s(ew.round_, s.div(x, scale), mode="half_even"), scale)


def isnan(s: Site, x: Value) -> Value:
    return s.is_nan(x)


def signbit(s: Site, x: Value) -> Value:
    """The sign bit itself: true for -0."""
    if x.type.dtype.kind != "float":
        return s.compare("lt", x, 0) if x.type.dtype.is_integer else s.b.full(s.type, False)
    bits = s(ew.bitcast, x, dtype=_SIGNED[x.type.dtype.itemsize])
    return s.compare("lt", bits, 0)


def isinf(s: Site, x: Value) -> Value:
    if not x.type.dtype.is_inexact:
        return s.b.full(s.type, False)
    return s.compare("eq", s(ew.abs_, x), math.inf)


def absolute(s: Site, x: Value) -> Value:
    return x if x.type.dtype.kind in ("unsigned", "bool") else s(ew.abs_, x)


def sign(s: Site, x: Value) -> Value:
    if x.type.dtype == bool_:
        return x
    if x.type.dtype.kind != "float":
        return s(ew.sign, x)
    return s.select(s.is_nan(x), 0, s(ew.sign, x), x.type)  # torch: the sign of NaN is 0


def _extreme(op: Op, ignoring_nan: bool = False) -> PlainRule:
    def rule(s: Site, x: Operand, y: Operand) -> Value:
        a, b = s.operands(x, y)
        if a.type.dtype == bool_:
            return s(ew.or_ if op is ew.max_ else ew.and_, a, b)
        result = s(op, a, b)
        if not ignoring_nan or not a.type.dtype.is_inexact:
            return result
        result = s.select(s.is_nan(a), b, result, s.type)
        return s.select(s.is_nan(b), a, result, s.type)

    return rule


def clamp(s: Site, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    result = s.like(x, s.type)
    if low is not None:
        result = s(ew.max_, result, s.like(low, s.type))
    return result if high is None else s(ew.min_, result, s.like(high, s.type))


def clamp_max(s: Site, x: Value, high: Operand) -> Value:
    return clamp(s, x, None, high)


def where(s: Site, pred: Value, x: Operand, y: Operand) -> Value:
    return s.select(pred, x, y, s.type)


def masked_fill(s: Site, x: Value, mask: Value, value: Operand) -> Value:
    return s.select(mask, value, x, s.type)


def convert(s: Site, x: Value, *_: Any, **__: Any) -> Value:
    """Another dtype (device and memory format are not of the program)."""
    return s.b.convert(x, s.type.dtype)


def view_dtype(s: Site, x: Value, dtype: torch.dtype) -> Value:
    return s(ew.bitcast, x, dtype=FROM_TORCH[dtype])


def identity(s: Site, x: Value, *_: Any, **__: Any) -> Value:
    return x


def make_complex(s: Site, x: Value, y: Value) -> Value:
    part = TensorType(x.type.dtype, s.type.shape)
    return s(ew.complex_, s.like(x, part), s.like(y, part))


_UNARY: dict[Any, Op] = {
    aten.neg: ew.neg,
    aten.exp: ew.exp,
    aten.exp2: ew.exp2,
    aten.expm1: ew.expm1,
    aten.log: ew.log,
    aten.log1p: ew.log1p,
    aten.log2: ew.log2,
    aten.sqrt: ew.sqrt,
    aten.rsqrt: ew.rsqrt,
    aten.sin: ew.sin,
    aten.cos: ew.cos,
    aten.tan: ew.tan,
    aten.asin: ew.asin,
    aten.acos: ew.acos,
    aten.atan: ew.atan,
    aten.sinh: ew.sinh,
    aten.cosh: ew.cosh,
    aten.tanh: ew.tanh,
    aten.asinh: ew.asinh,
    aten.acosh: ew.acosh,
    aten.atanh: ew.atanh,
    aten.sigmoid: ew.logistic,
    aten.erf: ew.erf,
    aten.erfc: ew.erfc,
    aten.erfinv: ew.erf_inv,
    aten.lgamma: ew.lgamma,
    aten.digamma: ew.digamma,
    aten.bitwise_not: ew.not_,
}

_COMPARISONS: dict[Any, str] = {
    aten.eq: "eq",
    aten.ne: "ne",
    aten.lt: "lt",
    aten.le: "le",
    aten.gt: "gt",
    aten.ge: "ge",
}

RULES: Rules = {
    **{packet.default: _unary(op) for packet, op in _UNARY.items()},
    **{packet.Tensor: _comparison(d) for packet, d in _COMPARISONS.items()},
    **{packet.Scalar: _comparison(d) for packet, d in _COMPARISONS.items()},
    aten.maximum.default: _extreme(ew.max_),
    aten.minimum.default: _extreme(ew.min_),
    aten.fmax.default: _extreme(ew.max_, ignoring_nan=True),
    aten.fmin.default: _extreme(ew.min_, ignoring_nan=True),
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_min.Tensor: clamp,
    aten.clamp_max.default: clamp_max,
    aten.clamp_max.Tensor: clamp_max,
    aten.logical_and.default: _logical(ew.and_),
    aten.logical_or.default: _logical(ew.or_),
    aten.logical_xor.default: _logical(ew.xor),
    aten.logical_not.default: logical_not,
    aten.bitwise_and.Tensor: _bitwise(ew.and_),
    aten.bitwise_and.Scalar: _bitwise(ew.and_),
    aten.bitwise_or.Tensor: _bitwise(ew.or_),
    aten.bitwise_or.Scalar: _bitwise(ew.or_),
    aten.bitwise_xor.Tensor: _bitwise(ew.xor),
    aten.bitwise_xor.Scalar: _bitwise(ew.xor),
    aten.bitwise_left_shift.Tensor: _bitwise(ew.shift_left),
    aten.bitwise_left_shift.Tensor_Scalar: _bitwise(ew.shift_left),
    aten.__lshift__.Tensor: _bitwise(ew.shift_left),
    aten.__lshift__.Scalar: _bitwise(ew.shift_left),
    aten.__rshift__.Tensor: _bitwise(ew.shift_right_arithmetic),
    aten.__rshift__.Scalar: _bitwise(ew.shift_right_arithmetic),
    aten.bitwise_right_shift.Tensor: _bitwise(ew.shift_right_arithmetic),
    aten.bitwise_right_shift.Tensor_Scalar: _bitwise(ew.shift_right_arithmetic),
    aten.abs.default: absolute,
    aten.sign.default: sign,
    aten.sgn.default: sign,
    aten.floor.default: whole(ew.floor),
    aten.ceil.default: whole(ew.ceil),
    aten.trunc.default: whole(ew.trunc),
    aten.round.default: whole(ew.round_),
    aten.round.decimals: round_decimals,
    aten.frac.default: frac,
    aten.log10.default: log10,
    aten.isnan.default: isnan,
    aten.signbit.default: signbit,
    aten.isinf.default: isinf,
    aten.where.self: where,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten._to_copy.default: convert,
    aten.view.dtype: view_dtype,
    aten.complex.default: make_complex,
    aten._conj.default: _unary(ew.conj),
    aten._conj_physical.default: _unary(ew.conj),
    aten.real.default: lambda s, x: s(ew.real, x),
    aten.imag.default: lambda s, x: s(ew.imag, x),
    aten.clone.default: identity,
    aten.detach.default: identity,
    aten.alias.default: identity,
    aten.lift_fresh_copy.default: identity,
    aten.lift_fresh.default: identity,
    aten.resolve_conj.default: identity,
    aten.resolve_neg.default: identity,
}
