"""Emitters of the elementwise ops but those on integers alone and the conversions."""

from collections.abc import Callable

import torch
from torch import Tensor

from plait.backends.torch.carriers import ordered, wrap
from plait.backends.torch.emitter import Call, Table, computes, computes_wide, moves
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.ops import elementwise as ops


def _neg(call: Call, x: Tensor) -> Tensor:
    return wrap(torch.neg(x), call.dtype)


def _abs(call: Call, x: Tensor) -> Tensor:
    return x if call.dtype.kind == "unsigned" else torch.abs(x)


def _sign(call: Call, x: Tensor) -> Tensor:
    if call.dtype.kind == "unsigned":
        return (x != 0).to(x.dtype)
    if call.dtype.kind == "float":
        return torch.where(torch.isnan(x), x, torch.sign(x))
    return torch.sgn(x)


def _not(call: Call, x: Tensor) -> Tensor:
    return wrap(torch.bitwise_not(x), call.dtype)


def _cbrt(x: Tensor) -> Tensor:
    return torch.copysign(torch.pow(torch.abs(x), 1 / 3), x)


def _round(x: Tensor, mode: str) -> Tensor:
    if mode == "half_even":
        return torch.round(x)
    whole = torch.trunc(x)
    away = whole + torch.sign(x)
    return torch.where(torch.abs(x - whole) >= 0.5, away, whole)


def _extreme(pick: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def emit(call: Call, x: Tensor, y: Tensor) -> Tensor:
        dtype = call.dtype
        if dtype.kind == "complex":
            raise UnsupportedError(f"{call.eqn.op} of complex numbers: torch does not order them")
        return ordered(pick(ordered(x, dtype), ordered(y, dtype)), dtype)

    return emit


_COMPARE = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}


def _compare(call: Call, x: Tensor, y: Tensor) -> Tensor:
    compare = _COMPARE[call.attrs["direction"]]
    return compare(ordered(x, call.dtype), ordered(y, call.dtype))


EMITTERS: Table = {
    ops.neg: _neg,
    ops.abs_: _abs,
    ops.sign: _sign,
    ops.not_: _not,
    ops.exp: computes(torch.exp),
    ops.exp2: computes(torch.exp2),
    ops.expm1: computes(torch.expm1),
    ops.log: computes(torch.log),
    ops.log1p: computes(torch.log1p),
    ops.log2: computes(torch.log2),
    ops.sqrt: computes(torch.sqrt),
    ops.rsqrt: computes(torch.rsqrt),
    ops.cbrt: computes_wide(_cbrt),
    ops.sin: computes(torch.sin),
    ops.cos: computes(torch.cos),
    ops.tan: computes(torch.tan),
    ops.asin: computes(torch.asin),
    ops.acos: computes(torch.acos),
    ops.atan: computes(torch.atan),
    ops.sinh: computes(torch.sinh),
    ops.cosh: computes(torch.cosh),
    ops.tanh: computes(torch.tanh),
    ops.asinh: computes(torch.asinh),
    ops.acosh: computes(torch.acosh),
    ops.atanh: computes(torch.atanh),
    ops.logistic: computes(torch.sigmoid),
    ops.erf: computes(torch.erf),
    ops.erfc: computes(torch.erfc),
    ops.erf_inv: computes(torch.erfinv),
    ops.lgamma: computes(torch.lgamma),
    ops.digamma: computes(torch.digamma),
    ops.floor: computes(torch.floor),
    ops.ceil: computes(torch.ceil),
    ops.trunc: computes(torch.trunc),
    ops.round_: computes_wide(_round),
    ops.is_finite: moves(torch.isfinite),
    ops.real: moves(torch.real),
    ops.imag: moves(torch.imag),
    ops.conj: moves(torch.conj_physical),
    ops.add: computes(torch.add),
    ops.sub: computes(torch.sub),
    ops.mul: computes(torch.mul),
    ops.div: computes(torch.div),
    ops.atan2: computes(torch.atan2),
    ops.nextafter: moves(torch.nextafter),
    ops.max_: _extreme(torch.maximum),
    ops.min_: _extreme(torch.minimum),
    ops.complex_: moves(torch.complex),
    ops.compare: _compare,
    ops.select: moves(torch.where),
}
