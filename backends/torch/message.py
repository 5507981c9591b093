"""Messages: some tensors packed into one of bytes, and back."""

from collections.abc import Sequence

import torch

from plait.backends.torch.arrays import torch_dtype
from plait.core_ir.types import TensorType


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of the tensors, one after another (one tensor alone is not copied)."""
    parts = [t.contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(buffer: torch.Tensor, types: Sequence[TensorType]) -> list[torch.Tensor]:
    """The tensors of these types that were packed; they share the buffer's memory where alignment allows."""
    tensors, start = [], 0
    for kind in types:
        part = buffer[start : start + kind.num_bytes]
        if start % kind.dtype.itemsize:
            part = part.clone()
        tensors.append(part.view(torch_dtype(kind.dtype)).reshape(kind.shape))
        start += kind.num_bytes
    return tensors
