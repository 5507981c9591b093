"""What torch models over several ranks have in common: how values that ranks have alike, or parts of, enter a loss."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import DTensor


class Spread(torch.autograd.Function):
    """A value that the ranks of a group have alike, each of which computes something else from it.

    Its gradient is the sum of theirs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not isinstance(grad, DTensor):
            return functional.all_reduce(grad, "sum", ctx.group), None
        total = functional.all_reduce(grad.to_local(), "sum", ctx.group)
        mesh, placements = grad.device_mesh, grad.placements
        return DTensor.from_local(total, mesh, placements, run_check=False), None


class Total(torch.autograd.Function):
    """The sum over a group of what each rank has; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return functional.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def mean(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of the losses of a group's ranks, on each of them."""
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return Total.apply(loss, group) / dist.get_world_size(group)
