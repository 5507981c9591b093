"""Carriers: the torch dtype in which a value of an element type is held inside an emitted graph.

torch has few kernels for u16, u32, u64 and 8-bit floats. Inside a graph they are held in wider tensors: u16 in int32
and u32 in int64 by their number, u64 in int64 by its bits, 8-bit floats in float32. Ports keep their own dtypes.
Invariant: a carrier holds numbers of its element type only; arithmetic restores this with `wrap`.
"""

import math

import torch
from torch import Tensor

from plait.backends.torch.arrays import torch_dtype
from plait.core_ir.types import DType, bool_, f8e4m3fn, f8e5m2, u8, u16, u32, u64

_CARRIERS: dict[DType, torch.dtype] = {
    u16: torch.int32,
    u32: torch.int64,
    u64: torch.int64,
    f8e4m3fn: torch.float32,
    f8e5m2: torch.float32,
}
_MASKS = {u16: 0xFFFF, u32: 0xFFFFFFFF}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1


def carrier(dtype: DType) -> torch.dtype:
    """The torch dtype that holds values of an element type inside a graph."""
    return _CARRIERS.get(dtype) or torch_dtype(dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; x itself, untraced, when it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def enter(x: Tensor, dtype: DType) -> Tensor:
    """The carrier of a port."""
    return cast(x, carrier(dtype))


def leave(x: Tensor, dtype: DType) -> Tensor:
    """The port of a carrier."""
    return cast(x, torch_dtype(dtype))


def wrap(x: Tensor, dtype: DType) -> Tensor:
    """The carrier of a result: integers modulo their width, floats rounded to their bits."""
    if dtype in _MASKS:
        return cast(x, carrier(dtype)) & _MASKS[dtype]
    if dtype == f8e5m2:
        return x.to(torch.float8_e5m2).to(torch.float32)
    if dtype == f8e4m3fn:  # torch saturates where the format, having no infinity, says NaN
        x = cast(x, torch.float32)
        return torch.where(x.abs() <= 464, x.to(torch.float8_e4m3fn).to(torch.float32), math.nan)
    return cast(x, carrier(dtype))


def ordered(x: Tensor, dtype: DType) -> Tensor:
    """A tensor that compares as the values do; its own inverse but for bool."""
    if dtype == u64:
        return x ^ INT64_MIN
    return x.to(torch.uint8) if dtype == bool_ else x


def is_narrow(dtype: DType) -> bool:
    """Whether these are 8- or 16-bit floats, whose sums and composed formulas are computed in f32."""
    return dtype.kind == "float" and dtype.itemsize <= 2


def widen(x: Tensor, dtype: DType) -> Tensor:
    """x in f32 where its dtype is narrow."""
    return cast(x, torch.float32) if is_narrow(dtype) else x


def to_bits(x: Tensor, dtype: DType) -> Tensor:
    """The bits of a value as a signed integer tensor of the element type's size."""
    bits = _SIGNED[dtype.itemsize]
    if dtype.kind == "float":
        return leave(x, dtype).view(bits)
    return x.view(bits) if dtype == u8 else x.to(bits)


def from_bits(bits: Tensor, dtype: DType) -> Tensor:
    """The carrier of the value with these bits."""
    if dtype.kind == "float":
        return enter(bits.view(torch_dtype(dtype)), dtype)
    if dtype == bool_:
        return bits != 0
    return bits.view(torch.uint8) if dtype == u8 else wrap(bits, dtype)
