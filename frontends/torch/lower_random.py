"""Lowering of random ops: bits from the node's own key, numbers made of them as jax.random makes them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import random as rnd
from plait.core_ir.ops import reduce as rd
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import (
    DType,
    TensorType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from plait.frontends.torch.rules import Operand, Result, Rules, Site

aten = torch.ops.aten

_BITS: dict[DType, tuple[DType, DType, int, int]] = {
    f16: (u16, u16, 10, 0x3C00),
    bf16: (u8, u16, 7, 0x3F80),
    f32: (u32, u32, 23, 0x3F800000),
    f64: (u64, u64, 52, 0x3FF0000000000000),
}
"""Of a float: the bits drawn, the unsigned type of its width, the bits of its mantissa, and the bits of 1.0."""

_LOWEST = {f16: -0.99951171875, bf16: -0.99609375, f32: -0.99999994, f64: -0.9999999999999999}
"""The float next to -1."""


def unit_uniform(s: Site, key: Value, type: TensorType) -> Value:
    """[0, 1): random bits as the mantissa of a number in [1, 2), minus 1."""
    drawn, unsigned, mantissa, one = _BITS[type.dtype]
    bits = s.b.convert(s(rnd.random_bits, key, shape=type.shape, dtype=drawn), unsigned)
    shift = s.b.full(bits.type, drawn.itemsize * 8 - mantissa)
    bits = s(ew.or_, s(ew.shift_right_logical, bits, shift), s.b.full(bits.type, one))
    return s.sub(s(ew.bitcast, bits, dtype=type.dtype), 1)


def bernoulli_mask(s: Site, key: Value, shape: Sequence[int], p: Operand) -> Value:
    """True with probability p."""
    return s.compare("lt", unit_uniform(s, key, TensorType(f32, tuple(shape))), p)


def _normal(s: Site, type: TensorType) -> Value:
    low = _LOWEST[type.dtype]
    unit = unit_uniform(s, s.new_key(), type)
    uniform = s(ew.max_, s.add(s.mul(unit, 1 - low), low), s.b.full(type, low))
    if type.dtype in (f16, bf16):
        wide = s(ew.erf_inv, s.b.convert(uniform, f32))
        return s.b.convert(s.mul(wide, math.sqrt(2)), type.dtype)
    return s.mul(s(ew.erf_inv, uniform), math.sqrt(2))


def bernoulli_p(s: Site, x: Value, p: float = 0.5, *, generator: Any = None) -> Value:
    return s.b.convert(bernoulli_mask(s, s.new_key(), s.type.shape, p), s.type.dtype)


def bernoulli(s: Site, p: Value, *, generator: Any = None) -> Value:
    mask = bernoulli_mask(s, s.new_key(), s.type.shape, s.b.convert(p, f32))
    return s.b.convert(mask, s.type.dtype)


def dropout(s: Site, x: Value, p: float, train: bool | None) -> Result:
    type = x.type
    if train is False or p == 0:
        return x, s.b.full(type.with_dtype(bool_), True)
    mask = bernoulli_mask(s, s.new_key(), type.shape, 1 - p)
    return _scaled(s, x, mask, 1 / (1 - p) if p < 1 else 0.0), mask


def dropout_backward(s: Site, grad: Value, mask: Value, scale: float) -> Value:
    return _scaled(s, grad, mask, scale)


def _scaled(s: Site, x: Value, mask: Value, scale: float) -> Value:
    return s.mul(s.select(mask, x, 0, x.type), scale)


def rand(s: Site, *_: Any, **__: Any) -> Value:
    return unit_uniform(s, s.new_key(), s.type)


def randn(s: Site, *_: Any, **__: Any) -> Value:
    return _normal(s, s.type)


def uniform(
    s: Site, x: Value, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Value:
    return s.add(s.mul(unit_uniform(s, s.new_key(), s.type), high - low), low)


def normal(
    s: Site, x: Value, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Value:
    return s.add(s.mul(_normal(s, s.type), std), mean)


def normal_tensor(s: Site, mean: Operand, std: Operand = 1.0, *, generator: Any = None) -> Value:
    return s.add(s.mul(_normal(s, s.type), std), mean)


def exponential(s: Site, x: Value, rate: float = 1.0, *, generator: Any = None) -> Value:
    unit = unit_uniform(s, s.new_key(), s.type)
    return s.div(s(ew.neg, s(ew.log1p, s(ew.neg, unit))), rate)


def _integers(s: Site, low: int, high: int) -> Value:
    """In [low, high): bits modulo the width of the range, as torch draws them."""
    unsigned = u32 if high - low <= 1 << 32 else u64
    wide = unsigned if high - low < 1 << 32 else u64
    bits = s(rnd.random_bits, s.new_key(), shape=s.type.shape, dtype=unsigned)
    bits = s.b.convert(bits, wide)
    offset = s(ew.rem, bits, s.b.full(bits.type, high - low), sign="dividend")
    return s.add(s.b.convert(offset, s.type.dtype), low)


def randint(s: Site, high: int, *_: Any, **__: Any) -> Value:
    return _integers(s, 0, high)


def randint_low(s: Site, low: int, high: int, *_: Any, **__: Any) -> Value:
    return _integers(s, low, high)


def randint_like(s: Site, x: Value, high: int, **_: Any) -> Value:
    return _integers(s, 0, high)


def randint_like_low(s: Site, x: Value, low: int, high: int, **_: Any) -> Value:
    return _integers(s, low, high)


def randperm(s: Site, n: int, **_: Any) -> Value:
    """The order that sorts random bits."""
    bits = s(rnd.random_bits, s.new_key(), shape=(n,), dtype=u64)
    index = s(sh.iota, dtype=i64, shape=(n,), dim=0)
    return s.b.convert(s.b.emit(rd.sort, bits, index, dim=0, num_keys=1)[1], s.type.dtype)


RULES: Rules = {
    aten.bernoulli.p: bernoulli_p,
    aten.bernoulli.default: bernoulli,
    aten.native_dropout.default: dropout,
    aten.native_dropout_backward.default: dropout_backward,
    aten.rand.default: rand,
    aten.rand_like.default: rand,
    aten.randn.default: randn,
    aten.randn_like.default: randn,
    aten.uniform.default: uniform,
    aten.normal_functional.default: normal,
    aten.normal.Tensor_float: normal_tensor,
    aten.normal.Tensor_Tensor: normal_tensor,
    aten.exponential.default: exponential,
    aten.randint.default: randint,
    aten.randint.low: randint_low,
    aten.randint_like.default: randint_like,
    aten.randint_like.low_dtype: randint_like_low,
    aten.randperm.default: randperm,
}
