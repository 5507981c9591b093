"""Lowering of arithmetic: operands promoted and broadcast, numbers beside 16-bit floats kept exact."""

from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.types import bf16, bool_, f16
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.rules import (
    Number,
    Operand,
    PlainRule,
    Rules,
    Site,
    in_compute_dtype,
)

aten = torch.ops.aten


def _arithmetic(op: Op, **attrs: Any) -> PlainRule:
    """Both operands in the result's type; with a number beside a 16-bit float, computed in f32 as torch does."""

    def rule(s: Site, x: Operand, y: Operand) -> Value:
        type = s.type
        scalar = not (isinstance(x, Value) and isinstance(y, Value))
        if scalar and type.dtype in (f16, bf16):
            wide = type.with_dtype(compute_dtype(type.dtype))
            return s.b.convert(s(op, s.like(x, wide), s.like(y, wide), **attrs), type.dtype)
        return s(op, *s.operands(x, y), **attrs)

    return rule


_add, _sub, _mul, _div = (_arithmetic(op) for op in (ew.add, ew.sub, ew.mul, ew.div))
_rem = _arithmetic(ew.rem, sign="divisor")
_fmod = _arithmetic(ew.rem, sign="dividend")


def _scaled(s: Site, y: Operand, alpha: Number) -> Operand:
    if alpha == 1:
        return y
    return _mul(s, y, alpha) if isinstance(y, Value) else y * alpha


def _bool_sum(s: Site, x: Operand, y: Operand) -> Value:
    return s(ew.or_, *s.operands(x, y))


def add(s: Site, x: Operand, y: Operand, alpha: Number = 1) -> Any:
    if s.type.dtype == bool_:
        return _bool_sum(s, x, y)
    return _add(s, x, _scaled(s, y, alpha))


def sub(s: Site, x: Operand, y: Operand, alpha: Number = 1) -> Any:
    return _sub(s, x, _scaled(s, y, alpha))


def rsub(s: Site, x: Operand, y: Operand, alpha: Number = 1) -> Any:
    return _sub(s, y, _scaled(s, x, alpha))


def mul(s: Site, x: Operand, y: Operand) -> Any:
    if s.type.dtype == bool_:
        return s(ew.and_, *s.operands(x, y))
    return _mul(s, x, y)


def div_mode(s: Site, x: Operand, y: Operand, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _div(s, x, y)
    if s.type.dtype.is_integer:
        return s(ew.int_div, *s.operands(x, y), rounding=rounding_mode)
    if rounding_mode == "trunc":
        return _float_trunc_div(s, x, y)
    return _float_floor_div(s, x, y)


@in_compute_dtype
def _float_trunc_div(s: Site, x: Operand, y: Operand) -> Value:
    return s(ew.trunc, s(ew.div, *s.operands(x, y)))


@in_compute_dtype
def _float_floor_div(s: Site, x: Operand, y: Operand) -> Value:
    """Python's floor division: the quotient of what the remainder leaves, rounded to the nearest integer."""
    a, b = s.operands(x, y)
    rest = s(ew.rem, a, b, sign="dividend")
    quotient = s(ew.div, s(ew.sub, a, rest), b)
    below = s(
        ew.and_,
        s.compare("ne", rest, 0),
        s(ew.xor, s.compare("lt", b, 0), s.compare("lt", rest, 0)),
    )
    quotient = s.select(below, s.sub(quotient, 1), quotient, s.type)
    floor = s(ew.floor, quotient)
    floor = s.select(s.compare("gt", s.sub(quotient, floor), 0.5), s.add(floor, 1), floor, s.type)
    exact = s(ew.div, a, b)
    floor = s.select(s.compare("eq", quotient, 0), s.mul(s(ew.sign, exact), 0), floor, s.type)
    return s.select(s.compare("eq", b, 0), exact, floor, s.type)


def floor_divide(s: Site, x: Operand, y: Operand) -> Any:
    return div_mode(s, x, y, rounding_mode="floor")


@in_compute_dtype
def pow_number(s: Site, x: Value, exponent: Number) -> Value:
    """Small exponents as products and roots, as torch computes them; else the op."""
    x = s.b.convert(x, s.type.dtype)
    if exponent == 0:
        return s.b.full(s.type, 1)
    if exponent == 1:
        return x
    if exponent == 2:
        return s(ew.mul, x, x)
    if exponent == 3:
        return s(ew.mul, s(ew.mul, x, x), x)
    if s.type.dtype.is_inexact:
        if exponent == 0.5:
            return s(ew.sqrt, x)
        if exponent == -0.5:
            return s(ew.rsqrt, x)
        if exponent == -1:
            return s(ew.div, s.b.full(s.type, 1), x)
        if exponent == -2:
            return s(ew.div, s.b.full(s.type, 1), s(ew.mul, x, x))
    return s(ew.pow_, x, s.b.full(s.type, exponent))


@in_compute_dtype
def pow_tensor(s: Site, x: Operand, y: Operand) -> Value:
    base, exponent = s.operands(x, y)
    power = s(ew.pow_, base, exponent)
    if s.type.dtype.kind != "signed":
        return power
    # torch: a negative exponent gives 1 / base**-exponent, truncated; only 1 and -1 leave anything
    odd = s.compare("ne", s(ew.and_, exponent, s.b.full(s.type, 1)), 0)
    sign = s.select(odd, -1, 1, s.type)
    small = s.select(s.compare("eq", base, -1), sign, 0, s.type)
    small = s.select(s.compare("eq", base, 1), 1, small, s.type)
    return s.select(s.compare("lt", exponent, 0), small, power, s.type)


def reciprocal(s: Site, x: Value) -> Value:
    return s(ew.div, s.b.full(s.type, 1), s.b.convert(x, s.type.dtype))


def addcmul(s: Site, x: Value, a: Value, b: Value, *, value: Number = 1) -> Value:
    return _fused(s, x, a, b, value, ew.mul)


def addcdiv(s: Site, x: Value, a: Value, b: Value, *, value: Number = 1) -> Value:
    return _fused(s, x, a, b, value, ew.div)


def _fused(s: Site, x: Value, a: Value, b: Value, value: Number, op: Op) -> Value:
    type = s.type.with_dtype(compute_dtype(s.type.dtype))
    term = s(op, s.like(a, type), s.like(b, type))
    if value != 1:
        term = s.mul(term, value)
    return s.b.convert(s(ew.add, s.like(x, type), term), s.type.dtype)


@in_compute_dtype
def lerp(s: Site, x: Value, end: Value, weight: Operand) -> Value:
    """torch's two-sided form: exact at both ends."""
    a, b, w = s.operands(x, end, weight)
    span = s(ew.sub, b, a)
    near = s(ew.add, a, s(ew.mul, w, span))
    far = s(ew.sub, b, s(ew.mul, span, s(ew.sub, s.b.full(s.type, 1), w)))
    return s.select(s.compare("lt", s(ew.abs_, w), 0.5), near, far, s.type)


RULES: Rules = {
    aten.add.Tensor: add,
    aten.add.Scalar: add,
    aten.sub.Tensor: sub,
    aten.sub.Scalar: sub,
    aten.rsub.Tensor: rsub,
    aten.rsub.Scalar: rsub,
    aten.mul.Tensor: mul,
    aten.mul.Scalar: mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.div.Tensor_mode: div_mode,
    aten.div.Scalar_mode: div_mode,
    aten.floor_divide.default: floor_divide,
    aten.remainder.Tensor: _rem,
    aten.remainder.Scalar: _rem,
    aten.remainder.Scalar_Tensor: _rem,
    aten.fmod.Tensor: _fmod,
    aten.fmod.Scalar: _fmod,
    aten.pow.Tensor_Scalar: pow_number,
    aten.pow.Tensor_Tensor: pow_tensor,
    aten.pow.Scalar: pow_tensor,
    aten.atan2.default: _arithmetic(ew.atan2),
    aten.nextafter.default: _arithmetic(ew.nextafter),
    aten.reciprocal.default: reciprocal,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.lerp.Tensor: lerp,
    aten.lerp.Scalar: lerp,
}
