"""Ranks that are threads of this process, and process groups in which they meet.

Compiled code finds the group of an axis by its name and calls it as it calls any other; which rank calls is the thread
that it runs in. So one artifact serves here and in a run of many processes.

NOTE: torch calls a process group written in Python by the names of its methods. Tested with torch 2.13.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plait.backends.torch.mesh_groups import name_axis_group
from plait.core_ir.errors import ExecutionError

T = TypeVar("T")

_REDUCE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class _LeftError(ExecutionError):
    """Another rank has failed or ended, and will not come."""


@dataclass
class _Meeting:
    """What the ranks of a group bring, by their place along the axis; complete once all have come."""

    brought: dict[int, Tensor] = field(default_factory=dict)
    is_complete: bool = False


class Threads:
    """Runs a function on each of some ranks at once, a thread for each, and lets them meet along axes of their mesh."""

    def __init__(self, places: Sequence[Mapping[str, int]], axes: Mapping[str, int]) -> None:
        self._places, self._changed = list(places), threading.Condition()
        self._here = threading.local()
        self._open: dict[tuple[Any, ...], _Meeting] = {}
        self._present = 0
        self._groups = {axis: _Group(self, axis, size) for axis, size in axes.items() if size > 1}

    def enter(self) -> None:
        """Have compiled code find these groups by the names of their axes, from here on."""
        for axis, group in self._groups.items():
            name_axis_group(axis, group)

    def run(self, rank: Callable[[int], T]) -> list[T]:
        """What `rank(number)` gives on each rank; the first error that is not of another's making."""
        self._open.clear()
        self._present = len(self._places)
        self.enter()

        def one(number: int) -> T:
            self._here.place = self._places[number]
            try:
                return rank(number)
            finally:
                with self._changed:
                    self._present -= 1
                    self._changed.notify_all()

        with ThreadPoolExecutor(len(self._places)) as pool:
            runs = [pool.submit(one, number) for number in range(len(self._places))]
        errors = [error for run in runs if (error := run.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _LeftError)):
            raise error
        return [run.result() for run in runs]

    def place(self, axis: str) -> int:
        """Where along an axis the rank stands that asks; that of the first where a compiler does."""
        return int(getattr(self._here, "place", self._places[0])[axis])

    def meet(self, axis: str, size: int, x: Tensor) -> list[Tensor]:
        """What all ranks of a group bring, in their order; copies, as who brought it goes on before others read."""
        own: Mapping[str, int] = self._here.place
        key = (axis, *(number for other, number in own.items() if other != axis))
        with self._changed:
            meeting = self._open.setdefault(key, _Meeting())
            meeting.brought[own[axis]] = x.clone()
            if len(meeting.brought) == size:
                meeting.is_complete = True
                del self._open[key]
                self._present += size - 1
                self._changed.notify_all()
            else:
                self._present -= 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: meeting.is_complete or self._present <= 0)
            if not meeting.is_complete:
                raise _LeftError(
                    f"the rank at {dict(own)} waits in a collective over {axis!r} for ranks that do not come"
                )
        return [meeting.brought[number] for number in range(size)]


class Done(dist.Work):
    """Work that has been done."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """The ranks along an axis, whichever of its groups the calling thread belongs to."""

    def __init__(self, threads: Threads, axis: str, size: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self._threads, self._axis, self._size = threads, axis, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._threads.place(self._axis)

    def getBackendName(self) -> str:
        return "threads"

    def _meet(self, x: Tensor) -> list[Tensor]:
        return self._threads.meet(self._axis, self._size, x)

    def _reduced(self, x: Tensor, opts: Any) -> Tensor:
        return reduce(_REDUCE[opts.reduceOp.op], self._meet(x))

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        for x in tensors:
            x.copy_(self._reduced(x, opts))
        return Done()

    def allgather_into_tensor_coalesced(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for out, x in zip(outs, xs, strict=True):
            out.copy_(torch.cat(self._meet(x)))
        return Done()

    def reduce_scatter_tensor_coalesced(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for out, x in zip(outs, xs, strict=True):
            out.copy_(self._reduced(x, opts).chunk(self._size)[self.rank()])
        return Done()

    def alltoall_base(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> dist.Work:
        rank, start = self.rank(), 0
        table = self._meet(torch.tensor(sent))
        for source, whole in enumerate(self._meet(x)):
            counts = table[source].tolist()
            first = sum(counts[:rank])
            part = whole[first : first + counts[rank]]
            out[start : start + len(part)].copy_(part)
            start += len(part)
        return Done()
