"""What each gloo rank runs: models whose parameters are DTensors, in torch, as plain ones, and as they are captured."""

import copy
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from ranks_of_models import Results, check_captured, compare, eager
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import plait
from plait.core_ir.mesh import Mesh, part_of

MESH = Mesh({"stage": 1, "outer": 2, "inner": 2})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    """An embedding, blocks, and a head; i64[2, 4] -> [2, 4, 12]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def with_loss_parallel(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    with loss_parallel():
        return loss_fn(model, batch)


def in_torch(_: Any, model: nn.Module, batch: Mapping[str, Tensor]) -> Results:
    """As torch wants it: the backward inside too."""
    with loss_parallel():
        return eager(loss_fn, model, batch)


def blocks(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {f"blocks.{i}.{name}": style for i in range(2) for name, style in plan.items()}


def plans() -> dict[str, Mapping[str, Any]]:
    mlp = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    sequence = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    vocabulary = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return {
        "blocks": blocks(mlp),
        "whole head": {**blocks(mlp), "head": ColwiseParallel(output_layouts=Replicate())},
        "sequence": {
            "embed": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1)
            ),
            **blocks(sequence),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        "prepared": {
            **blocks(mlp),
            "blocks.1": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
            ),
        },
        "vocabulary": {**blocks(mlp), **vocabulary},
        "sequence and vocabulary": {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            **blocks(sequence),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    }


def batch() -> dict[str, Tensor]:
    drawn = torch.randint(12, (2, 2, 4), generator=torch.Generator().manual_seed(1))
    return {"tokens": drawn[0], "targets": drawn[1]}


def parallel(plain: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(copy.deepcopy(plain), mesh["inner"], dict(plan))


def check(name: str, plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """What is captured against torch's run of the parallel model, and of the plain one."""
    torch.manual_seed(0)
    plain = Tokens()
    model = parallel(plain, plan, mesh)
    if "vocabulary" in name:  # what crosses the last two cuts are DTensors
        split = ["blocks.1", "norm", "head"] if "sequence" in name else []
        captured, found = check_captured(
            with_loss_parallel, model, batch(), MESH, in_torch, split=split
        )
        assert captured.num_cuts == len(split)
    else:
        captured, found = check_captured(loss_fn, model, batch(), MESH)
    expected = eager(loss_fn, plain, batch())
    place = MESH.place(dist.get_rank())
    parts = {
        (role, n): part_of(x, captured.layouts.get(n, ()), MESH.axes, place)
        for (role, n), x in expected.items()
    }
    compare(found, parts, 1e-5)


def compiled(name: str) -> None:
    """A step of the compiled model: `.grad` are DTensors with the gradients of the plain model; so is all else."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "inner"))
    torch.manual_seed(0)
    plain, given = Tokens(), {key: x.repeat(2, 1) for key, x in batch().items()}
    pipeline = plait.compile(
        with_loss_parallel if "vocabulary" in name else loss_fn,
        parallel(plain, plans()[name], mesh),
        given,
        num_microbatches=4,
        split=["blocks.1", "norm", "head"],
        schedule="interleaved-zb",
        mesh=mesh,
        codegen="eager",
    )
    wanted = loss_fn(plain, given)
    wanted.backward()
    torch.testing.assert_close(pipeline.step(given), wanted.detach(), rtol=1e-6, atol=0)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    _, grads = pipeline.loss_and_grads(given)
    for name, parameter in pipeline.named_parameters():
        for grad in (parameter.grad, grads[name]):
            assert isinstance(grad, DTensor) == isinstance(parameter, DTensor), name
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
                assert grad.placements == parameter.placements
                grad = grad.full_tensor()
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(pipeline.clip_grad_norm_(1e-3), norm, rtol=1e-5, atol=0)
    for model in (pipeline, plain):
        torch.optim.SGD(model.parameters(), 1.0).step()
    state = {key: x for key, x in pipeline.state_dict().items()}
    pipeline.load_state_dict(state)
    pipeline.load_state_dict(plain.state_dict())
    for key, x in pipeline.state_dict().items():
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        torch.testing.assert_close(whole, plain.state_dict()[key], rtol=0, atol=0)


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(MESH.axes.values()), mesh_dim_names=tuple(MESH.axes))
    for name in sys.argv[2:] or plans():
        if sys.argv[1] == "captured":
            check(name, plans()[name], mesh)
        else:
            compiled(name)
        print(name)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
