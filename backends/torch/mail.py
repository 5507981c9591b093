"""The messages of one step of one rank: posted, in flight, arrived. A message is one packed tensor of bytes."""

from collections import deque
from collections.abc import Sequence

import torch
from torch.distributed import Work

from plait.backends.messages import message_types, num_bytes
from plait.backends.torch.arrays import torch_dtype
from plait.backends.torch.process_group import Members
from plait.core_ir.program import EdgeKind, Program
from plait.core_ir.types import TensorType

IN_FLIGHT = 4
"""Sends to one rank that may be under way at once. Waiting for older ones cannot deadlock: a lowered schedule runs even
where every send blocks."""


class Mail:
    """Sends and receives between the stages of a program, as placed on ranks."""

    def __init__(
        self, program: Program, placement: Sequence[int], group: Members, device: torch.device
    ) -> None:
        self._program, self._placement = program, placement
        self._group, self._device = group, device
        self._sent: dict[int, deque[tuple[Work, torch.Tensor]]] = {}
        self._arriving: dict[tuple[int, int, int, EdgeKind], tuple[Work, torch.Tensor]] = {}

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors to the rank of stage `peer`."""
        rank = self._placement[peer]
        packed = pack(tensors)
        sent = self._sent.setdefault(rank, deque())
        sent.append((self._group.isend(packed, rank), packed))
        if len(sent) > IN_FLIGHT:
            sent.popleft()[0].wait()

    def receive(self, stage: int, peer: int, microbatch: int, kind: EdgeKind) -> None:
        """Begin to receive what `stage` reads of stage `peer`."""
        size = num_bytes(message_types(self._program, peer, stage, kind))
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        work = self._group.irecv(buffer, self._placement[peer])
        self._arriving[stage, peer, microbatch, kind] = (work, buffer)

    def open(
        self, stage: int, peer: int, microbatch: int, kind: EdgeKind
    ) -> list[torch.Tensor] | None:
        """The tensors of a message, waited for; None where none was posted (the peer runs on this rank)."""
        message = self._arriving.pop((stage, peer, microbatch, kind), None)
        if message is None:
            return None
        work, buffer = message
        work.wait()
        return unpack(buffer, message_types(self._program, peer, stage, kind))

    def finish(self) -> None:
        """Wait for the sends still under way."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()


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
