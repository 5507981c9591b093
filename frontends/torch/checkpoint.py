"""torch.utils.checkpoint while a model is captured: what is computed again, and what crossed the cuts inside a region.

The adapter to its private hooks, those of use_reentrant=False. Tested with torch 2.13.0.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock
from weakref import ReferenceType

from torch import Tensor
from torch._C._autograd import _saved_tensors_hooks_set_tracing
from torch.utils import checkpoint

Cut: TypeAlias = Sequence[Tensor]
"""The tensors that a marker gave."""


@dataclass
class Regions:
    """The checkpointed regions of a capture.

    cuts: what each region's forward met, by the frame that torch keeps of it. forward: the frames whose forward runs.
    again: the recomputations that run, outermost first: a number, and the cuts still to meet.
    """

    cuts: dict[Any, list[Cut]] = field(default_factory=dict)
    forward: list[Any] = field(default_factory=list)
    again: list[tuple[int, Iterator[Cut]]] = field(default_factory=list)


_regions: ContextVar[Regions | None] = ContextVar("plait_torch_regions", default=None)
_numbers = itertools.count()


def recomputation() -> int | None:
    """The number of the recomputation that runs, each time another; None outside."""
    regions = _regions.get()
    return regions.again[-1][0] if regions is not None and regions.again else None


def keep_cut(tensors: Cut) -> None:
    """Note what a marker gave, for the regions whose forward runs; a copy, since the region may change it in place."""
    regions = _regions.get()
    if regions is None or not regions.forward:
        return
    copies = [x.detach().clone() for x in tensors]
    for frame in regions.forward:
        regions.cuts[frame].append(copies)


def next_cut() -> Cut | None:
    """What crossed the cut that a recomputation meets; None outside of one, and where its forward met no cut."""
    regions = _regions.get()
    if regions is None or not regions.again:
        return None
    tensors = next(regions.again[-1][1], None)
    if tensors is not None:
        keep_cut(tensors)
    return tensors


@contextmanager
def following() -> Iterator[None]:
    """Inside, checkpointed regions are followed."""
    regions = Regions()
    forward_hook, again_hook = checkpoint._checkpoint_hook, checkpoint._recomputation_hook

    @contextmanager
    def forward(frame: Any) -> Iterator[None]:
        regions.cuts[frame] = []
        regions.forward.append(frame)
        try:
            with _hooks_traced(), forward_hook(frame):
                yield
        finally:
            regions.forward.pop()

    @contextmanager
    def again(frame: ReferenceType[Any], graph_task: Any) -> Iterator[None]:
        regions.again.append((next(_numbers), iter(regions.cuts[frame()])))
        try:
            with _hooks_traced(), again_hook(frame, graph_task):
                yield
        finally:
            regions.again.pop()

    token = _regions.set(regions)
    try:
        with (
            mock.patch.object(checkpoint, "_checkpoint_hook", forward),
            mock.patch.object(checkpoint, "_recomputation_hook", again),
            # else every result of a selective region is saved, for the partitioner of torch.compile to choose from
            mock.patch.object(checkpoint, "_is_compiling", return_value=False),
        ):
            yield
    finally:
        _regions.reset(token)


@contextmanager
def _hooks_traced() -> Iterator[None]:
    """Inside, hooks on saved tensors work. While AOTAutograd traces, they are left to the time of the run."""
    before = _saved_tensors_hooks_set_tracing(False)
    try:
        yield
    finally:
        _saved_tensors_hooks_set_tracing(before)
