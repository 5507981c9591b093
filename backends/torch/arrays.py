"""Tensors of arrays of any framework, and which torch dtype carries which element type."""

from typing import Any

import numpy as np
import torch

from plait.core_ir.arrays import TORCH_NAMES, array_type, is_torch, to_numpy
from plait.core_ir.errors import UsageError
from plait.core_ir.types import DType, TensorType, dtype

_TORCH: dict[str, torch.dtype] = {ours: getattr(torch, name) for name, ours in TORCH_NAMES.items()}
_PLAIT = {theirs: dtype(name) for name, theirs in _TORCH.items()}
_BITS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16)}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of an element type."""
    return _TORCH[dtype.name]


def plait_dtype(dtype: torch.dtype) -> DType:
    """The element type of a torch dtype; KeyError where there is none."""
    return _PLAIT[dtype]


def to_torch(x: Any, type: TensorType | None, device: torch.device) -> torch.Tensor:
    """An array of torch, JAX or NumPy, or a number, as a detached contiguous tensor on `device`.

    It shares the array's memory where torch can: the caller must not write to it. Raises UsageError where `type` is
    given and the array has another one.
    """
    tensor = x.detach() if is_torch(x) else _from_numpy(to_numpy(x))
    if type is not None and array_type(tensor) != type:
        raise UsageError(f"expected an array of type {type}, got {array_type(tensor)}")
    return tensor.resolve_conj().resolve_neg().to(device).contiguous()


def _from_numpy(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    array = np.asarray(array, order="C")
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that must not be written
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    kind = array_type(array)  # f8 and bf16: NumPy has them of ml_dtypes, which torch does not read
    theirs, ours = _BITS[kind.dtype.itemsize]
    raw = torch.from_numpy(array.reshape(-1).view(theirs)).view(ours)
    return raw.view(torch_dtype(kind.dtype)).reshape(kind.shape)
