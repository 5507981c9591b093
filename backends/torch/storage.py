"""Tensors that leave a graph: row-major contiguous, and none in the storage of another."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def separate(outputs: Sequence[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """The outputs, copied where they are not contiguous or share storage with an input or an earlier output."""
    taken = {_storage(x) for x in inputs}
    results = []
    for x in outputs:
        if not x.is_contiguous():
            x = x.contiguous()
        if _storage(x) in taken:
            x = x.clone(memory_format=torch.contiguous_format)
        taken.add(_storage(x))
        results.append(x)
    return results


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
