"""Lowering of ops that make tensors of a size, and masks by position."""

from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import shape as sh
from plait.core_ir.types import TensorType, i64
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.rules import Number, Operand, Rules, Site

aten = torch.ops.aten


def _triangle(s: Site, type: TensorType, diagonal: int) -> Value:
    """Where column - row <= diagonal, over the last two dims."""
    matrix = TensorType(i64, type.shape[-2:])
    row = s(sh.iota, dtype=i64, shape=matrix.shape, dim=0)
    column = s(sh.iota, dtype=i64, shape=matrix.shape, dim=1)
    return s(ew.compare, s(ew.sub, column, row), s.b.full(matrix, diagonal), direction="le")


def tril(s: Site, x: Value, diagonal: int = 0) -> Value:
    return s.select(_triangle(s, x.type, diagonal), x, 0, x.type)


def triu(s: Site, x: Value, diagonal: int = 0) -> Value:
    return s.select(_triangle(s, x.type, diagonal - 1), 0, x, x.type)


def arange(s: Site, start: Number, end: Number, step: Number = 1, **_: Any) -> Value:
    return _count(s, s.type, start, step)


def arange_to(s: Site, end: Number, **_: Any) -> Value:
    return _count(s, s.type, 0, 1)


def arange_from(s: Site, start: Number, end: Number, **_: Any) -> Value:
    return _count(s, s.type, start, 1)


def _count(s: Site, type: TensorType, start: Number, step: Number) -> Value:
    wide = type.with_dtype(compute_dtype(type.dtype))
    numbers = s(sh.iota, dtype=wide.dtype, shape=type.shape, dim=0)
    if step != 1:
        numbers = s.mul(numbers, step)
    if start != 0 or s.mesh is not None:  # on a mesh others may start elsewhere
        numbers = s.add(numbers, start)
    return s.b.convert(numbers, type.dtype)


def full(s: Site, _: Any, value: Operand, **__: Any) -> Value:
    """Of a size, or like a tensor."""
    return s.like(value, s.type)


def fill(s: Site, x: Value, value: Operand) -> Value:
    return s.like(value, s.type)


def zeros(s: Site, *_: Any, **__: Any) -> Value:
    """Memory that torch leaves uninitialised is zero here."""
    return s.b.full(s.type, 0)


def ones(s: Site, *_: Any, **__: Any) -> Value:
    return s.b.full(s.type, 1)


def scalar_tensor(s: Site, value: Number, **_: Any) -> Value:
    return s.b.full(s.type, value)


def eye(s: Site, *_: Any, **__: Any) -> Value:
    index = TensorType(i64, s.type.shape)
    row = s(sh.iota, dtype=i64, shape=index.shape, dim=0)
    column = s(sh.iota, dtype=i64, shape=index.shape, dim=1)
    return s.b.convert(s(ew.compare, row, column, direction="eq"), s.type.dtype)


RULES: Rules = {
    **dict.fromkeys(
        (
            aten.zeros.default,
            aten.zeros_like.default,
            aten.new_zeros.default,
            aten.empty.memory_format,
            aten.empty_like.default,
            aten.empty_strided.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        ),
        zeros,
    ),
    aten.tril.default: tril,
    aten.triu.default: triu,
    aten.arange.default: arange_to,
    aten.arange.start: arange_from,
    aten.arange.start_step: arange,
    aten.full.default: full,
    aten.full_like.default: full,
    aten.new_full.default: lambda s, _, size, value, **__: s.like(value, s.type),
    aten.fill.Scalar: fill,
    aten.fill.Tensor: fill,
    aten.ones.default: ones,
    aten.ones_like.default: ones,
    aten.new_ones.default: ones,
    aten.scalar_tensor.default: scalar_tensor,
    aten.eye.default: eye,
    aten.eye.m: eye,
}
