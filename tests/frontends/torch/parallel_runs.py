"""What each gloo rank runs: models with collectives, in torch and as they are captured."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks_of_models import check_captured
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional as differentiable

from plait.core_ir.mesh import Mesh

MESH = Mesh({"stage": 1, "outer": 2, "inner": 2})


class Parallel(nn.Module):
    """A function between two layers; weights differ by rank."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    y = model(batch["x"])
    scale = torch.arange(float(y.numel())).view_as(y)
    return (y * scale).square().mean()


class Summed(torch.autograd.Function):
    """A sum over ranks, each of which has the whole gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Copied(torch.autograd.Function):
    """The same tensor, whose gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        work = dist.all_reduce(grad, dist.ReduceOp.SUM, ctx.group, async_op=True)
        assert work is not None
        work.wait()
        return grad, None


def gathered(x: Tensor, group: Any) -> Tensor:
    """The parts of others without gradient."""
    out = x.new_empty(2 * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.detach(), group)
    return x.repeat(2, 1) * out


def listed(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.detach(), group=group)
    return x * parts[0] + parts[1]


def exchanged(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.detach(), group=group)
    return x * out


def scattered(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.detach(), dist.ReduceOp.MAX, group)
    return x * out.repeat(2, 1)


def turned(x: Tensor, group: Any) -> Tensor:
    flat = functional.permute_tensor(x.flatten(), [1, 0], group)
    return flat.view_as(x)


def passed_on(x: Tensor, group: Any) -> Tensor:
    """A ring, as it is written with messages; what comes has no gradient."""
    place, size = dist.get_rank(group), dist.get_world_size(group)
    after = dist.get_global_rank(group, (place + 1) % size)
    before = dist.get_global_rank(group, (place - 1) % size)
    sent, got = x.detach(), torch.empty_like(x)
    messages = [
        dist.P2POp(dist.isend, sent, after, group),
        dist.P2POp(dist.irecv, got, before, group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return x * got


def models(mesh: DeviceMesh) -> dict[str, Callable[[Tensor], Tensor]]:
    inner, outer, world = mesh.get_group("inner"), mesh.get_group("outer"), dist.group.WORLD
    exchange = functional.all_to_all_single_autograd
    gather = functional.all_gather_single_autograd
    scatter = functional.reduce_scatter_single_autograd
    return {
        "sum": lambda x: functional.all_reduce(x, "sum", inner),
        "sums over two axes": lambda x: functional.all_reduce(
            functional.all_reduce(x, "sum", (mesh, 1)) * x, "sum", (mesh, 2)
        ),
        "sum over all": lambda x: functional.all_reduce(x, "sum", world),
        "gather": lambda x: gather(x, 0, inner),
        "gather-1": lambda x: gather(x[:, :4], 1, outer),
        "gather over all": lambda x: gather(x[:, :2], 0, world)[:, None].repeat(1, 4, 1).flatten(1),
        "scatter": lambda x: scatter(x, "sum", 0, outer),
        "scatter-1": lambda x: scatter(x.repeat(1, 2), "sum", 1, inner),
        "scatter over all": lambda x: scatter(x, "sum", 0, world),
        "exchange": lambda x: exchange(x, None, None, outer),
        "exchange over all": lambda x: exchange(x, [1] * 4, [1] * 4, world),
        "turned": lambda x: turned(x, outer),
        "passed on": lambda x: passed_on(x, inner),
        "copied, then summed": lambda x: Summed.apply(Copied.apply(x, inner).sin(), inner),
        "nn sum": lambda x: differentiable.all_reduce(x, group=inner),
        "nn scatter": lambda x: differentiable.reduce_scatter(
            x.new_empty(2, 8), list(x.chunk(2)), group=inner
        ),
        "nn exchange": lambda x: differentiable.all_to_all_single(
            torch.empty_like(x), x, group=outer
        ),
        "gathered": lambda x: gathered(x, inner),
        "listed": lambda x: listed(x, outer),
        "exchanged": lambda x: exchanged(x, inner),
        "scattered": lambda x: scattered(x, inner),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    names = tuple(MESH.axes)
    for name, between in models(
        init_device_mesh("cpu", tuple(MESH.axes.values()), mesh_dim_names=names)
    ).items():
        batch = {"x": torch.randn(4, 6)}
        captured, _ = check_captured(loss_fn, Parallel(between), batch, MESH)
        assert captured.named_axes, name
        print(name, sorted(captured.named_axes))
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
