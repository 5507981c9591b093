"""Rules for equations that only move data: each gives a simpler value for the result, or None."""

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops.elementwise import convert
from plait.core_ir.ops.shape import broadcast, reshape, transpose
from plait.core_ir.passes.folder import Folder
from plait.core_ir.types import DType


def fold_reshape(folder: Folder, eqn: Eqn) -> Value | None:
    """To the same shape: the operand. Of a reshape: one. Of one repeated element: a broadcast."""
    (x,), to = eqn.operands, eqn.attrs["shape"]
    if x.type.shape == to:
        return x
    if inner := folder.made_by(x, reshape):
        return folder.make(reshape, inner.operands[0], shape=to)
    inner = folder.made_by(x, broadcast)
    if inner and not inner.attrs["dims"]:
        return folder.make(broadcast, inner.operands[0], shape=to, dims=())
    return None


def fold_transpose(folder: Folder, eqn: Eqn) -> Value | None:
    """Moving nothing, or dims of size 1: a reshape. Of a transpose: one. Of a broadcast: the broadcast of one."""
    (x,), permutation = eqn.operands, eqn.attrs["permutation"]
    moved = [d for d in permutation if x.type.shape[d] != 1]
    if moved == sorted(moved):
        return folder.make(reshape, x, shape=eqn.result.type.shape)
    if inner := folder.made_by(x, transpose):
        before = inner.attrs["permutation"]
        return folder.make(
            transpose, inner.operands[0], permutation=tuple(before[d] for d in permutation)
        )
    if inner := folder.made_by(x, broadcast):
        (y,), dims = inner.operands, inner.attrs["dims"]
        goes_to = [permutation.index(d) for d in dims]
        order = tuple(sorted(range(len(dims)), key=goes_to.__getitem__))
        y = folder.make(transpose, y, permutation=order)
        return folder.make(broadcast, y, shape=eqn.result.type.shape, dims=tuple(sorted(goes_to)))
    return None


def fold_broadcast(folder: Folder, eqn: Eqn) -> Value | None:
    """Without repetition: a reshape. Of dims of size 1: of fewer dims. Of a broadcast: one."""
    (x,), to, dims = eqn.operands, eqn.attrs["shape"], eqn.attrs["dims"]
    if x.type.size == eqn.result.type.size:
        return folder.make(reshape, x, shape=to)
    kept = [d for d, size in enumerate(x.type.shape) if size != 1]
    if len(kept) < x.type.rank:
        y = folder.make(reshape, x, shape=tuple(x.type.shape[d] for d in kept))
        return folder.make(broadcast, y, shape=to, dims=tuple(dims[d] for d in kept))
    if inner := folder.made_by(x, broadcast):
        (y,), before = inner.operands, inner.attrs["dims"]
        return folder.make(broadcast, y, shape=to, dims=tuple(dims[d] for d in before))
    return None


def fold_convert(folder: Folder, eqn: Eqn) -> Value | None:
    """To the same dtype: the operand. Of a conversion that lost nothing: one."""
    (x,), to = eqn.operands, eqn.attrs["dtype"]
    if x.type.dtype == to:
        return x
    inner = folder.made_by(x, convert)
    if inner and _holds(x.type.dtype, inner.operands[0].type.dtype):
        return folder.make(convert, inner.operands[0], dtype=to)
    return None


def fold_slice(folder: Folder, eqn: Eqn) -> Value | None:
    """All of the operand: the operand."""
    return eqn.operands[0] if eqn.operands[0].type == eqn.result.type else None


def fold_reverse(folder: Folder, eqn: Eqn) -> Value | None:
    """Of dims of size 1: the operand."""
    (x,) = eqn.operands
    return x if all(x.type.shape[d] <= 1 for d in eqn.attrs["dims"]) else None


_WIDER_FLOATS = {
    "f8e4m3fn": ("f16", "bf16", "f32", "f64"),
    "f8e5m2": ("f16", "bf16", "f32", "f64"),
    "f16": ("f32", "f64"),
    "bf16": ("f32", "f64"),
    "f32": ("f64",),
}


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether every number of the narrow type is one of the wide type."""
    if narrow.kind == "bool" and wide.kind != "bool":
        return True
    if narrow.kind == wide.kind and narrow.is_integer:
        return wide.itemsize >= narrow.itemsize
    return wide.name in _WIDER_FLOATS.get(narrow.name, ())
