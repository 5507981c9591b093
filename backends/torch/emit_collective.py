"""Emitters of collectives. A start moves what it sends to dimension 0; the wait brings what came into its place.

Libraries of collectives know few element types, and lose NaN in maxima and minima. So values are moved as bits or in a
wider type, and floats are compared as integers in the same order. A group of one needs no process group.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from plait.backends.torch import mesh_groups as groups
from plait.backends.torch.carriers import INT64_MIN, from_bits, to_bits, widen, wrap
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.core_ir.types import DType, bool_, i16, u32, u64

# How values travel.


def _packed(x: Tensor, dtype: DType) -> Tensor:
    """A tensor of a type that every library moves; a complex one has a dimension more, the last."""
    if dtype.kind == "complex":
        return torch.view_as_real(x)
    if dtype == bool_:
        return x.to(torch.uint8)
    if dtype == i16:
        return x.to(torch.int32)
    return to_bits(x, dtype) if dtype == u32 or _is_tiny(dtype) else x


def _unpacked(x: Tensor, dtype: DType) -> Tensor:
    if dtype.kind == "complex":
        return torch.view_as_complex(x)
    if dtype == bool_:
        return x != 0
    if dtype == i16:
        return x.to(torch.int16)
    return from_bits(x, dtype) if dtype == u32 or _is_tiny(dtype) else x


def _is_tiny(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize == 1


def _reducible(x: Tensor, dtype: DType, reduction: str) -> Tensor:
    """A tensor of a type that every library reduces, and whose order is that of the values."""
    if dtype.kind == "complex":
        return torch.view_as_real(x)
    if dtype == bool_:
        return x.to(torch.uint8)
    if dtype == i16:
        return x.to(torch.int32)
    if reduction in ("sum", "product"):
        return x
    if dtype == u64:
        return x ^ INT64_MIN
    return _ordered(widen(x, dtype), reduction) if dtype.kind == "float" else x


def _reduced(x: Tensor, dtype: DType, reduction: str) -> Tensor:
    """The carrier of what was reduced."""
    if dtype.kind == "complex":
        return torch.view_as_complex(x)
    if dtype == bool_:
        return x != 0
    if reduction in ("max", "min") and dtype == u64:
        return x ^ INT64_MIN
    if reduction in ("max", "min") and dtype.kind == "float":
        x = _from_ordered(x)
    return wrap(x, dtype)


def _ordered(x: Tensor, reduction: str) -> Tensor:
    """Integers that compare as the floats do; NaN is what the reduction prefers to all else."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    bounds = torch.iinfo(bits.dtype)
    nan = bounds.max if reduction == "max" else bounds.min
    return torch.where(x.isnan(), nan, torch.where(bits < 0, bits ^ bounds.max, bits))


def _from_ordered(ordered: Tensor) -> Tensor:
    bits = torch.where(ordered < 0, ordered ^ torch.iinfo(ordered.dtype).max, ordered)
    return bits.view(torch.float32 if bits.dtype == torch.int32 else torch.float64)


def _product(of_ranks: Tensor) -> Tensor:
    """The product over dimension 0, by rank: complex numbers are multiplied by no library."""
    return reduce(torch.mul, of_ranks.unbind(0))


# Dimensions.


def _by_rank(x: Tensor, dim: int, size: int) -> Tensor:
    """The parts of x along a dim, on a new dimension 0."""
    shape = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0)


def _joined(of_ranks: Tensor, dim: int) -> Tensor:
    """Parts on dimension 0, joined along a dim."""
    return of_ranks.movedim(0, dim).flatten(dim, dim + 1)


def _exchanged(call: Call, x: Tensor, dim: int) -> Tensor:
    parts = _by_rank(_packed(x, call.dtype), dim, call.attrs["size"])
    return groups.start_all_to_all(parts, call.attrs["axis"], call.attrs["size"])


def _gathered(call: Call, x: Tensor) -> Tensor:
    packed = _packed(x, call.dtype)
    return groups.start_all_gather(packed.unsqueeze(0), call.attrs["axis"], call.attrs["size"])


# Each start, and what its wait makes of what came.


def _is_complex_product(call: Call) -> bool:
    return call.dtype.kind == "complex" and call.attrs["reduction"] == "product"


def _all_gather(call: Call, x: Tensor) -> Tensor:
    return _gathered(call, x)


def _end_all_gather(call: Call, came: Tensor) -> Tensor:
    return _joined(_unpacked(came, call.dtype), call.attrs["dim"])


def _reduce_scatter(call: Call, x: Tensor) -> Tensor:
    attrs = call.attrs
    if _is_complex_product(call):
        return _exchanged(call, x, attrs["dim"])
    parts = _by_rank(_reducible(x, call.dtype, attrs["reduction"]), attrs["dim"], attrs["size"])
    return groups.start_reduce_scatter(parts, attrs["axis"], attrs["size"], attrs["reduction"])


def _end_reduce_scatter(call: Call, came: Tensor) -> Tensor:
    if _is_complex_product(call):
        return _product(_unpacked(came, call.dtype))
    return _reduced(came.squeeze(0), call.dtype, call.attrs["reduction"])


def _all_reduce(call: Call, x: Tensor) -> Tensor:
    if _is_complex_product(call):
        return _gathered(call, x)
    reduction = call.attrs["reduction"]
    return groups.start_all_reduce(
        _reducible(x, call.dtype, reduction), call.attrs["axis"], reduction
    )


def _end_all_reduce(call: Call, came: Tensor) -> Tensor:
    if _is_complex_product(call):
        return _product(_unpacked(came, call.dtype))
    return _reduced(came, call.dtype, call.attrs["reduction"])


def _all_to_all(call: Call, x: Tensor) -> Tensor:
    return _exchanged(call, x, call.attrs["split_dim"])


def _end_all_to_all(call: Call, came: Tensor) -> Tensor:
    return _joined(_unpacked(came, call.dtype), call.attrs["concat_dim"])


def _permute(call: Call, x: Tensor) -> Tensor:
    return groups.start_permute(_packed(x, call.dtype), call.attrs["axis"], call.attrs["pairs"])


def _end_permute(call: Call, came: Tensor) -> Tensor:
    pair = (2,) if call.dtype.kind == "complex" else ()
    return _unpacked(came.reshape((*call.result.shape, *pair)), call.dtype)


_PARTS: dict[Op, tuple[Callable[[Call, Tensor], Tensor], Callable[[Call, Tensor], Tensor]]] = {
    ops.all_gather: (_all_gather, _end_all_gather),
    ops.reduce_scatter: (_reduce_scatter, _end_reduce_scatter),
    ops.all_reduce: (_all_reduce, _end_all_reduce),
    ops.all_to_all: (_all_to_all, _end_all_to_all),
    ops.permute: (_permute, _end_permute),
}


def _start(call: Call, x: Tensor) -> Tensor:
    return x if call.attrs["size"] == 1 else _PARTS[call.eqn.op][0](call, x)


def _wait(call: Call, x: Tensor) -> Tensor:
    start = call.started.get(call.eqn.operands[0])
    if start is None:  # an input of this graph: rows, as `exchange_rows` has them
        return groups.wait(x)
    if start.attrs["size"] > 1:
        return _PARTS[start.eqn.op][1](start, groups.wait(x))
    is_sent = start.eqn.op is not ops.permute or len(start.attrs["pairs"]) > 0
    return x if is_sent else torch.zeros_like(x)


def _axis_index(call: Call) -> Tensor:
    if call.attrs["size"] == 1:
        return torch.zeros((), dtype=torch.int32, device=call.device)
    return groups.axis_index(call.attrs["axis"], call.device)


EMITTERS: Table = {
    **dict.fromkeys(ops.STARTS, _start),
    ops.wait: _wait,
    ops.axis_index: _axis_index,
}
