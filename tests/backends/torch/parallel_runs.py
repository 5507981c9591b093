"""What each rank of a test of models with collectives does; run by test_parallel.py, one process a rank."""

import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import plait
from plait.models.over_ranks import Spread, Total


class Layer(nn.Module):
    """A residual layer; with a group, the hidden units of `plain` lie over its ranks."""

    def __init__(self, plain: "Layer | None" = None, group: Any = None) -> None:
        super().__init__()
        self.group, self.norm = group, nn.LayerNorm(8)
        self.wide = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.narrow = nn.Parameter(torch.randn(16, 8) * 0.3)
        if plain is not None:
            self.wide = nn.Parameter(own_part("wide", plain.wide.detach(), group))
            self.narrow = nn.Parameter(own_part("narrow", plain.narrow.detach(), group))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h if self.group is None else Spread.apply(h, self.group)
        y = torch.tanh(h @ self.wide) @ self.narrow
        return x + (y if self.group is None else Total.apply(y, self.group))


def own_part(name: str, x: Tensor, group: Any) -> Tensor:
    """What a rank of the group has of a parameter, or of its gradient."""
    if "norm" in name:
        return x
    dim = 1 if "wide" in name else 0
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return cast("Tensor", model(x).square().mean())


def tensor_parallel() -> None:
    """A model with collectives of its own, alone and in replicas: the loss and the gradients of the plain model."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    plain, x = nn.Sequential(*layers), torch.randn(16, 8)
    wanted = loss_fn(plain, x)
    wanted.backward()  # type: ignore[no-untyped-call]
    sizes = {"stage": 2, "tensor": 2}
    if dist.get_world_size() == 8:
        sizes = {"data": 2, **sizes}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tensor = mesh.get_group("tensor")
    compiler = "inductor" if dist.get_world_size() == 4 else "eager"
    for schedule, codegen, given in (("zb-h1", compiler, mesh), ("dualpipev", "eager", sizes)):
        pipeline = plait.compile(
            loss_fn,
            nn.Sequential(*[Layer(layer, tensor) for layer in layers]),
            x,
            split=["1", "2", "3"] if schedule == "dualpipev" else ["2"],
            schedule=schedule,
            num_microbatches=4,
            mesh=given,
            codegen=codegen,
        )
        assert pipeline.options.mesh is not None
        assert pipeline.options.mesh.named_axes == ("tensor",)
        loss = pipeline.step(x)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
        grads = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in pipeline.named_parameters():
            grad = own_part(name, cast("Tensor", grads[name]), tensor)
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-6, msg=name)


RUNS = {run.__name__: run for run in (tensor_parallel,)}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    RUNS[sys.argv[1]]()
    dist.barrier()
    dist.destroy_process_group()
    print("done")
