"""Emitters of the ops on integers and bits: division, remainder, powers, shifts, counting bits.

Division by 0 and of the least integer by -1 trap on some processors, so their operands are replaced first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from plait.backends.torch.carriers import INT64_MAX, ordered, widen, wrap
from plait.backends.torch.emitter import Call, Table, moves
from plait.core_ir.ops import elementwise as ops
from plait.core_ir.types import DType, u64


def _all_ones(dtype: DType) -> int:
    """The number of a carrier whose bits are all set."""
    return -1 if dtype.kind == "signed" or dtype == u64 else 2 ** (8 * dtype.itemsize) - 1


def _divmod_u64(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of unsigned 64-bit integers held by their bits; y is not 0.

    Half of x fits a signed division; that quotient, doubled, is at most one too small. Where y itself does not fit, the
    quotient is 0 or 1.
    """
    positive = torch.where(y > 0, y, 1)
    estimate = torch.div(_logical_right(x, 1, 64), positive, rounding_mode="trunc") << 1
    rest = x - estimate * positive
    short = ordered(rest, u64) >= ordered(positive, u64)
    reached = ordered(x, u64) >= ordered(y, u64)
    quotient = torch.where(y > 0, estimate + short.to(torch.int64), reached.to(torch.int64))
    return quotient, x - quotient * y


def _int_div(call: Call, x: Tensor, y: Tensor) -> Tensor:
    dtype, rounding = call.dtype, call.attrs["rounding"]
    by_zero = y == 0
    if dtype == u64:
        quotient, _ = _divmod_u64(x, torch.where(by_zero, 1, y))
    elif dtype.kind == "unsigned":
        quotient = torch.div(x, torch.where(by_zero, 1, y), rounding_mode=rounding)
    else:
        safe = torch.where(by_zero | (y == -1), 1, y)
        quotient = torch.div(x, safe, rounding_mode=rounding)
        quotient = torch.where(y == -1, torch.neg(x), quotient)
    return torch.where(by_zero, torch.full_like(quotient, _all_ones(dtype)), quotient)


def _rem(call: Call, x: Tensor, y: Tensor) -> Tensor:
    dtype = call.dtype
    if dtype.kind == "float":
        return wrap(_float_rem(widen(x, dtype), widen(y, dtype), call.attrs["sign"]), dtype)
    function = torch.fmod if call.attrs["sign"] == "dividend" else torch.remainder
    by_zero = y == 0
    if dtype == u64:
        _, rest = _divmod_u64(x, torch.where(by_zero, 1, y))
        return torch.where(by_zero, x, rest)
    unsafe = by_zero | (y == -1) if dtype.kind == "signed" else by_zero
    rest = function(x, torch.where(unsafe, 1, y))  # the remainder by -1 is 0, as that by 1
    return torch.where(by_zero, x, rest)


def _float_rem(x: Tensor, y: Tensor, sign: str) -> Tensor:
    """fmod is exact; torch.remainder, as Inductor computes it, is not, and NaN for an infinite y."""
    rest = torch.fmod(x, y)
    if sign == "dividend":
        return rest
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def _pow(call: Call, x: Tensor, y: Tensor) -> Tensor:
    dtype = call.dtype
    if not dtype.is_integer:
        return wrap(torch.pow(x, y), dtype)
    if dtype != u64:
        return wrap(torch.pow(x, torch.clamp(y, min=0)), dtype)
    # x ** 2**63 is 1 for odd x and 0 for even x, modulo 2**64.
    low = torch.pow(x, y & INT64_MAX)
    return torch.where(y < 0, low * (x & 1), low)


def _logical_right(x: Tensor, amount: "Tensor | int", bits: int) -> Tensor:
    """Bits moved right, zeros moved in; 0 <= amount < bits, x of `bits` bits held in an int64."""
    if bits < 64:
        moved: Tensor = (x & (2**bits - 1)) >> amount
        return moved
    if isinstance(amount, int):
        return (x >> amount) & (INT64_MAX >> (amount - 1)) if amount else x
    kept: Tensor = torch.full_like(x, INT64_MAX) >> torch.clamp(amount - 1, min=0)
    return torch.where(amount == 0, x, (x >> amount) & kept)


def _shift(kind: str) -> Callable[[Call, Tensor, Tensor], Tensor]:
    def emit(call: Call, x: Tensor, amount: Tensor) -> Tensor:
        dtype, bits = call.dtype, 8 * call.dtype.itemsize
        wide_x, wide = x.to(torch.int64), amount.to(torch.int64)
        beyond = (wide < 0) | (wide >= bits)
        safe = torch.where(beyond, 0, wide)
        if kind == "left":
            return wrap(torch.where(beyond, 0, wide_x << safe), dtype)
        if kind == "logical" or dtype.kind == "unsigned":
            return wrap(torch.where(beyond, 0, _logical_right(wide_x, safe, bits)), dtype)
        return wrap(wide_x >> torch.where(beyond, bits - 1, wide), dtype)

    return emit


def _smeared(x: Tensor, bits: int) -> Tensor:
    """Each bit set at which x has one set or a higher one."""
    step = 1
    while step < bits:
        x = x | _logical_right(x, step, 64)
        step *= 2
    return x


def _count_bits(x: Tensor) -> Tensor:
    """Number of bits set in an int64: pairs, nibbles and bytes are counted in place, then added up."""
    x = x - (_logical_right(x, 1, 64) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + (_logical_right(x, 2, 64) & 0x3333333333333333)
    x = (x + _logical_right(x, 4, 64)) & 0x0F0F0F0F0F0F0F0F
    for step in (8, 16, 32):
        x = x + _logical_right(x, step, 64)
    return x & 0x7F


def _unsigned_bits(x: Tensor, dtype: DType) -> Tensor:
    x = x.to(torch.int64)
    return x if dtype.itemsize == 8 else x & (2 ** (8 * dtype.itemsize) - 1)


def _population_count(call: Call, x: Tensor) -> Tensor:
    return _count_bits(_unsigned_bits(x, call.dtype)).to(x.dtype)


def _count_leading_zeros(call: Call, x: Tensor) -> Tensor:
    bits = 8 * call.dtype.itemsize
    used = _count_bits(_smeared(_unsigned_bits(x, call.dtype), bits))
    return (bits - used).to(x.dtype)


EMITTERS: Table = {
    ops.int_div: _int_div,
    ops.rem: _rem,
    ops.pow_: _pow,
    ops.and_: moves(torch.bitwise_and),
    ops.or_: moves(torch.bitwise_or),
    ops.xor: moves(torch.bitwise_xor),
    ops.shift_left: _shift("left"),
    ops.shift_right_logical: _shift("logical"),
    ops.shift_right_arithmetic: _shift("arithmetic"),
    ops.population_count: _population_count,
    ops.count_leading_zeros: _count_leading_zeros,
}
