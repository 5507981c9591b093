"""Models under `fully_shard`, in a process that stands for one of eight ranks: sums, and what is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard

from plait.core_ir.errors import CaptureError
from plait.core_ir.mesh import Mesh
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture

MESH = Mesh({"stage": 2, "replica": 2, "part": 2})


@pytest.fixture(name="mesh", scope="module")
def _mesh() -> Iterator[DeviceMesh]:
    """The mesh of eight ranks that exist in name only. NOTE: once, since DTensor caches the groups of equal meshes."""
    dist.init_process_group("fake", rank=3, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "replica", "part"))
    dist.destroy_process_group()


def model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def captured(module: nn.Module, *data_axes: str) -> Captured:
    mesh = Mesh(MESH.axes, data_axes=data_axes)
    return capture(loss_fn, module, torch.ones(4, 8), num_microbatches=1, mesh=mesh, split=None)


def loss_fn(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def communication(found: Captured) -> list[tuple[str, str]]:
    return [
        (eqn.op.name, eqn.attrs["axis"])
        for eqn in found.graph.eqns
        if eqn.op.evaluate_ranks is not None
    ]


def test_gradients_of_parts_of_a_batch_are_added_up(mesh: DeviceMesh) -> None:
    module = fully_shard(model(), mesh=mesh["part"])
    hooks = dict(module._forward_pre_hooks), dict(module._forward_hooks)
    found = captured(module, "part")
    assert (dict(module._forward_pre_hooks), dict(module._forward_hooks)) == hooks
    assert communication(found) == [("all_gather", "part")] * 4 + [("reduce_scatter", "part")] * 4
    assert found.layouts == {name: (("part",),) for name, _ in module.named_parameters()}
    assert found.batch_axes == {"part"}
    divided = [e for e in captured(module).graph.eqns if e.op.name == "div"]
    assert len(divided) == len([e for e in found.graph.eqns if e.op.name == "div"]) + 4


def test_replicas_are_added_up_by_whoever_gives_them_their_parts(mesh: DeviceMesh) -> None:
    module = fully_shard(model(), mesh=mesh["replica", "part"])
    assert ("all_reduce", "replica") in communication(captured(module))
    found = captured(module, "replica", "part")
    assert found.batch_axes == {"replica", "part"}
    assert found.named_axes == {"part"}


def shard_each(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard([module[0], module[2]], mesh=mesh)  # type: ignore[index]
    return module


def without_sync(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    sharded = fully_shard(module, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    sharded.set_requires_gradient_sync(False)
    return sharded


def divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    sharded = fully_shard(module, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(3.0)
    return sharded


def offloaded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (shard_each, "with several modules in one call, which is not captured"),
        (without_sync, "with set_requires_gradient_sync"),
        (divided, r"with set_gradient_divide_factor.*passes=plait.passes.Passes\(sharding="),
        (offloaded, "with offload_policy"),
    ],
)
def test_what_is_refused(mesh: DeviceMesh, form: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(form(model(), mesh["part"]))


def test_parts_of_unequal_sizes(mesh: DeviceMesh) -> None:
    with pytest.raises(CaptureError, match=r"'0.weight' of the model, a DTensor: .*7 by 2; choose"):
        captured(fully_shard(model(7), mesh=mesh["part"]))


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_wrappers(mesh: DeviceMesh, wrap: Callable[..., nn.Module]) -> None:
    options = {} if wrap is nn.DataParallel else {"init_sync": False}
    with pytest.raises(CaptureError, match="wraps a model for data parallel training; pass the"):
        captured(wrap(model(), **options))
