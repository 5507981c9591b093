"""A transport for tests and benchmarks: gloo, whose collectives end only once a link of a stated speed would have
brought them.

On one machine gloo moves bytes with the cores that compute, so that hiding communication gains little. Here a
collective's `wait` sleeps until its time has come, and uses no core for it: what a network would do. Collectives of a
group run one after the other, as on one link; messages between two ranks are gloo's own.

    register(Link(bytes_per_second=1e8, microseconds=100))
    dist.init_process_group("delayed")

The time begins where this rank starts the collective. `DelayedGroup.mode` chooses: "link" is that, "gloo" is gloo as it
is, and with "none" an exchange gives each rank its own tensor back at once, to time what computes alone.

NOTE: torch calls a process group written in Python by the names of its methods. Tested with torch 2.13.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from plait.backends.torch.threads import Done
from plait.core_ir.hardware import Link

NAME = "delayed"


class _Delayed(dist.Work):
    """Ends once the work of gloo has ended and its time has come."""

    def __init__(self, work: Any, due: float) -> None:
        super().__init__()
        self._work, self._due = work, due

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._due and bool(self._work.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return True


class DelayedGroup(dist.ProcessGroup):
    """A gloo group behind a link.

    mode: of all groups of this process. sent: the bytes of each collective that this process has started.
    """

    mode: ClassVar[str] = "link"
    sent: ClassVar[list[int]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, link: Link) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._link, self._free = link, 0.0

    def _start(self, num_bytes: int, begin: Callable[[], Any]) -> Any:
        self.sent.append(num_bytes)
        if self.mode == "gloo":
            return begin()
        self._free = max(time.perf_counter(), self._free) + self._link.seconds(num_bytes)
        return _Delayed(begin(), self._free)

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:
        return NAME

    def alltoall_base(self, out: Tensor, x: Tensor, to: Any, from_: Any, opts: Any) -> Any:
        if self.mode == "none":
            out.copy_(x)
            return Done()
        sent = _bytes(x) * (self.size() - 1) // self.size()
        return self._start(sent, lambda: self._gloo.alltoall_base(out, x, to, from_, opts))

    def allgather_into_tensor_coalesced(self, outs: Any, xs: Any, opts: Any) -> Any:
        (out,), (x,) = outs, xs
        sent = _bytes(x) * (self.size() - 1)
        return self._start(sent, lambda: self._gloo._allgather_base(out, x, opts))

    def reduce_scatter_tensor_coalesced(self, outs: Any, xs: Any, opts: Any) -> Any:
        (out,), (x,) = outs, xs
        sent = _bytes(x) * (self.size() - 1) // self.size()
        return self._start(sent, lambda: self._gloo._reduce_scatter_base(out, x, opts))

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        sent = 2 * sum(map(_bytes, tensors)) * (self.size() - 1) // self.size()
        return self._start(sent, lambda: self._gloo.allreduce(tensors, opts))

    # Small talk: no link between.

    def allgather(self, out: Any, x: Any, opts: Any) -> Any:
        return self._gloo.allgather(out, x, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._gloo.broadcast(tensors, opts)

    def barrier(self, opts: Any) -> Any:
        return self._gloo.barrier(opts)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self._gloo.send(tensors, to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        return self._gloo.recv(tensors, source, tag)


def register(link: Link) -> None:
    """Make "delayed" a backend of `torch.distributed` in this process."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> DelayedGroup:
        return DelayedGroup(store, rank, size, timeout, link)

    dist.Backend.register_backend(NAME, create, devices=["cpu"])


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
