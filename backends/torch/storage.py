"""Tensors that leave a graph: row-major contiguous, and none in the storage of another."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def separate(outputs: Sequence[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """The outputs, copied where they are not contiguous or share storage with an input or an earlier output."""
    taken = {_storage(x) for x in inputs}
    results = []
    for x in outputs:
        if not x.is_contiguous() or _storage(x) in taken:
            x = copied(x)
        taken.add(_storage(x))
        results.append(x)
    return results


def copied(x: Tensor) -> Tensor:
    """A row-major contiguous copy. (`Tensor.contiguous` asks for a real device, even of fake tensors.)"""
    return x.clone(memory_format=torch.contiguous_format)


def dense(x: Tensor) -> Tensor:
    """x, copied where a broadcast has several elements in one place.

    What is to be written into in part has to be so: Inductor writes into the operand itself where nobody else reads it.
    """
    if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        return copied(x)
    return x


def _storage(x: Tensor) -> int:
    number: int = x.untyped_storage()._cdata
    return number
