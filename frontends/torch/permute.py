"""Tensors that ranks send to one another, as one op over all ranks of a group: torch has each rank say its own part.

`permute_tensor` names all pairs. Of a batch of sends and receives a rank knows its own neighbours: what it sends to the
k-th rank after it, all send.

NOTE: `permute_tensor` is private. Tested with torch 2.13.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import distributed_c10d

from plait.core_ir.errors import CaptureError
from plait.frontends.torch.replacing import Functions, replaced
from plait.frontends.torch.sources import calling_source


@torch.library.custom_op("plait::permute_ranks", mutates_args=())
def permute_ranks(x: Tensor, targets: Sequence[int], group: str) -> Tensor:
    """x of the rank that sends to this one: rank i of the group sends to `targets[i]`."""
    raise NotImplementedError("stands in captured programs alone")


@permute_ranks.register_fake
def _(x: Tensor, targets: Sequence[int], group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.targets, ctx.group = inputs[1:]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    sources = sorted(range(len(ctx.targets)), key=ctx.targets.__getitem__)
    return permute_ranks(grad, sources, ctx.group), None, None


permute_ranks.register_autograd(_back, setup_context=_keep)

PERMUTE = torch.ops.plait.permute_ranks.default


def _permute_tensor(self: Tensor, src_dst: Sequence[int], group: Any, tag: str = "") -> Tensor:
    """In place of `permute_tensor`."""
    name = functional._resolve_group_name(group, tag)
    if sorted(src_dst) != list(range(len(src_dst))):
        raise CaptureError(
            f"{calling_source()}: permute_tensor with {list(src_dst)}, where each rank must be sent to once"
        )
    result: Tensor = permute_ranks(self, list(src_dst), name)
    return result


class Sent:
    """In place of the work of an asynchronous collective, which in a captured program ends where it starts."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def _batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Sent]:
    """In place of `batch_isend_irecv`: its n-th send and its n-th receive are one exchange."""
    sends = [op for op in p2p_op_list if op.op is distributed_c10d.isend]
    receives = [op for op in p2p_op_list if op.op is distributed_c10d.irecv]
    shapes = [[(op.tensor.shape, op.tensor.dtype) for op in ops] for ops in (sends, receives)]
    turns = [_turn(send, receive) for send, receive in zip(sends, receives, strict=False)]
    known = [turn for turn in turns if turn is not None]
    if shapes[0] != shapes[1] or len(known) < len(turns):
        raise CaptureError(
            f"{calling_source()}: sends and receives of a captured program must be those of a ring: a rank sends to "
            "the k-th rank after it what it receives, of the same shape, from the k-th before it, in one "
            "batch_isend_irecv, the n-th send with the n-th receive"
        )
    with torch.no_grad():
        moved = []
        for send, turn in zip(sends, known, strict=True):
            size = dist.get_world_size(send.group)
            targets = [(rank + turn) % size for rank in range(size)]
            moved.append(permute_ranks(send.tensor, targets, send.group.group_name))
        for receive, x in zip(receives, moved, strict=True):
            receive.tensor.copy_(x)
    return [Sent() for _ in p2p_op_list]


def _turn(send: Any, receive: Any) -> int | None:
    """How many places further a rank sends, if it receives from as many places before."""
    size, place = dist.get_world_size(send.group), dist.get_rank(send.group)
    turn: int = (send.group_peer - place) % size
    before = (place - receive.group_peer) % size
    return turn if (send.group, turn) == (receive.group, before) else None


@contextmanager
def permuting() -> Iterator[None]:
    """Inside, what ranks send to one another is `permute_ranks`."""
    functions: Functions = {
        "permute_tensor": (functional.permute_tensor, _permute_tensor),
        "batch_isend_irecv": (distributed_c10d.batch_isend_irecv, _batch_isend_irecv),
    }
    with replaced(functions):
        yield
