"""What each gloo rank runs: models under `fully_shard`, in torch, as plain ones, and as they are captured."""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from ranks_of_models import Results, check_captured, eager
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import plait
from plait.core_ir.mesh import Mesh

MESH = Mesh({"stage": 1, "outer": 2, "inner": 2})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def by_columns(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def forms(mesh: DeviceMesh) -> dict[str, Any]:
    def each(model: nn.Sequential, **options: Any) -> nn.Module:
        for block in model:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def with_tensors_cut(model: nn.Sequential) -> nn.Module:
        for block in model:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["inner"], plan)
        return each(model, mesh=mesh["outer"])

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "sharded": lambda model: each(model, mesh=mesh["inner"]),
        "by columns": lambda model: each(model, mesh=mesh["inner"], shard_placement_fn=by_columns),
        "replicated": lambda model: each(model, mesh=mesh["outer", "inner"]),
        "bf16": lambda model: each(model, mesh=mesh["inner"], mp_policy=half),
        "tensors": with_tensors_cut,
    }


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def check(name: str, mesh: DeviceMesh) -> None:
    """Captured for one batch on all ranks, the mean of gradients is taken: as FSDP does it."""
    model = forms(mesh)[name](plain())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    if name == "tensors":
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("outer")))
    tolerance = 2e-2 if name == "bf16" else 1e-5

    def in_torch(loss: Any, model: nn.Module, batch: Any) -> Results:
        results = eager(loss, model, batch)
        model.zero_grad()
        return results

    captured, _ = check_captured(loss_fn, model, x, MESH, in_torch, tolerance)
    assert captured.batch_axes == {
        "replicated": {"outer", "inner"},
        "tensors": {"outer"},
    }.get(name, {"inner"})
    assert captured.layouts, name


def compiled(name: str) -> None:
    """A step of a compiled model is that of the plain one on all parts of the batch."""
    sizes = {"stage": 2, "inner": 2} if name != "tensors" else {"outer": 2, "stage": 1, "inner": 2}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    pipeline = plait.compile(
        loss_fn,
        forms(mesh)[name](plain()),
        x,
        num_microbatches=4,
        split=["1"] if sizes["stage"] > 1 else None,
        mesh=mesh,
        codegen="eager",
    )
    assert pipeline.options.mesh is not None
    assert pipeline.options.mesh.data_axes == (("outer",) if name == "tensors" else ("inner",))
    model = plain()
    wanted = loss_fn(model, x)
    wanted.backward()
    torch.testing.assert_close(pipeline.step(x), wanted.detach(), rtol=1e-6, atol=0)
    expected = {n: p.grad for n, p in model.named_parameters()}
    for n, p in pipeline.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, expected[n], rtol=1e-5, atol=1e-6, msg=n)


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(MESH.axes.values()), mesh_dim_names=tuple(MESH.axes))
    for name in sys.argv[2:]:
        if sys.argv[1] == "captured":
            check(name, mesh)
        else:
            compiled(name)
        print(name)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
