"""Emitters of conversions between element types."""

import math

import torch
from torch import Tensor

from plait.backends.torch.carriers import (
    INT64_MAX,
    INT64_MIN,
    carrier,
    from_bits,
    to_bits,
    widen,
    wrap,
)
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.ops import elementwise as ops
from plait.core_ir.types import DType, bool_, c64, c128, f32, f64, u64


def _from_u64(x: Tensor, wanted: DType) -> Tensor:
    """Floats nearest to unsigned 64-bit integers held by their bits.

    Those that do not fit a signed integer are halved; the bit lost is kept as a sticky one, so that it rounds the same.
    """
    halved = ((x >> 1) & INT64_MAX) | (x & 1)
    dtype = carrier(wanted) if wanted.itemsize >= 4 else torch.float32
    return wrap(torch.where(x < 0, halved.to(dtype) * 2, x.to(dtype)), wanted)


def _to_integer(x: Tensor, wanted: DType) -> Tensor:
    """Floats truncated to zero and saturated; NaN gives 0. The bounds are powers of two, exact in each float."""
    bits = 8 * wanted.itemsize
    signed = wanted.kind == "signed"
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    whole = torch.trunc(x)
    inside = torch.where((whole >= low) & (whole < high), whole, 0.0)
    if (
        wanted == u64
    ):  # the upper half is moved down to where int64 holds it, then its highest bit is set
        upper = inside >= 2.0**63
        number = torch.where(upper, inside - 2.0**63, inside).to(torch.int64)
        number = torch.where(upper, number ^ INT64_MIN, number)
        return torch.where(x >= high, -1, number)
    number = inside.to(carrier(wanted))
    number = torch.where(x >= high, torch.full_like(number, int(high) - 1), number)
    return torch.where(x < low, torch.full_like(number, int(low)), number)


def _convert(call: Call, x: Tensor) -> Tensor:
    have, wanted = call.dtype, call.result.dtype
    if have == wanted:
        return x
    if wanted == bool_:
        return x != 0
    if have.kind == "complex" and wanted.kind != "complex":
        x, have = torch.real(x), (f32 if have == c64 else f64)
    if have.kind == "float" and wanted.is_integer:
        return _to_integer(widen(x, have), wanted)
    if have == u64 and wanted.is_inexact:
        part = {c64: f32, c128: f64}.get(wanted, wanted)
        return wrap(_from_u64(x, part), wanted)
    return wrap(x, wanted)


def _bitcast(call: Call, x: Tensor) -> Tensor:
    have, wanted = call.dtype, call.result.dtype
    return x if have == wanted else from_bits(to_bits(x, have), wanted)


def _reduce_precision(call: Call, x: Tensor) -> Tensor:
    exponent_bits, mantissa_bits = call.attrs["exponent_bits"], call.attrs["mantissa_bits"]
    wide = widen(x, call.dtype)
    bits, mantissa, exponent = (
        (torch.int64, 52, 11) if wide.dtype == torch.float64 else (torch.int32, 23, 8)
    )
    out = wide
    if mantissa_bits < mantissa:
        drop = mantissa - mantissa_bits
        raw = wide.view(bits)
        odd = (raw >> drop) & 1
        out = ((raw + (2 ** (drop - 1) - 1) + odd) & -(2**drop)).view(wide.dtype)
    if exponent_bits < exponent:
        bias = 2 ** (exponent_bits - 1) - 1
        size = torch.abs(out)
        out = torch.where(
            size >= 2.0 ** (bias + 1), torch.copysign(torch.full_like(out, math.inf), wide), out
        )
        out = torch.where(
            size < 2.0 ** (1 - bias), torch.copysign(torch.zeros_like(out), wide), out
        )
    return wrap(torch.where(torch.isfinite(wide), out, wide), call.dtype)


EMITTERS: Table = {
    ops.convert: _convert,
    ops.bitcast: _bitcast,
    ops.reduce_precision: _reduce_precision,
}
