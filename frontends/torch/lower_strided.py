"""Lowering of as_strided, the one op that sees how torch lays a tensor in memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Value
from plait.core_ir.types import i64
from plait.frontends.torch.access import read, write
from plait.frontends.torch.rules import Rules, Site

aten = torch.ops.aten


def as_strided(
    s: Site, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Value:
    """The elements that lie at these places of the memory of torch's tensor, read by their own index."""
    flat = s.b.reshape(x, (x.type.size,))
    picked = read(s, flat, _elements(s, size, stride, offset), (0,), 0)
    return s.b.reshape(picked, s.type.shape)


def as_strided_scatter(
    s: Site,
    x: Value,
    src: Value,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
) -> Value:
    """x with those elements replaced."""
    flat, updates = (s.b.reshape(v, (v.type.size,)) for v in (x, src))
    result = write(s, flat, _elements(s, size, stride, offset), updates, (0,), 0, "set")
    return s.b.reshape(result, x.type.shape)


def _elements(s: Site, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Value:
    """Which elements of the first argument, counted in row-major order, lie at these places of its memory."""
    fake = s.fakes[0]
    start = fake.storage_offset()
    wanted = _places(size, stride, start if offset is None else offset)
    held = _places(fake.shape, fake.stride(), start)
    index = np.full(max(held.max(initial=-1), wanted.max(initial=-1)) + 1, -1)
    index[held] = np.arange(held.size)
    chosen = index[wanted]
    if (chosen < 0).any():
        raise CaptureError(
            f"{s.b.source}: as_strided reaches memory outside the tensor it is given ({list(fake.shape)}, strides "
            f"{list(fake.stride())}); apply it to the whole tensor, or index instead"
        )
    return s.b.literal(chosen[:, None], i64)


def _places(size: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray[Any, Any]:
    """Where in memory the elements of a strided tensor lie, in row-major order."""
    places = np.full((1,) * len(size), offset)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = [1] * len(size)
        shape[dim] = count
        places = places + (np.arange(count) * step).reshape(shape)
    return places.reshape(-1)


RULES: Rules = {
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
}
