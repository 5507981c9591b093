"""DTensors of a model in a process that stands for one of eight ranks: layouts, and what is refused."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import PlaitError
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh
from plait.core_ir.types import TensorType, f32
from plait.core_ir.verify import verify
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture

MESH = Mesh({"stage": 2, "data": 2, "model": 2})


@pytest.fixture(name="mesh", scope="module")
def _mesh() -> Iterator[DeviceMesh]:
    """The mesh of eight ranks that exist in name only. NOTE: once, since DTensor caches the groups of equal meshes."""
    dist.init_process_group("fake", rank=5, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))
    dist.destroy_process_group()


class Matrix(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight)


def captured(weight: Tensor, mesh: Mesh | None = MESH) -> Captured:
    return capture(
        lambda model, x: model(x).square().mean(),
        Matrix(weight),
        torch.ones(4, 8),
        num_microbatches=1,
        mesh=mesh,
        split=None,
    )


WEIGHT = torch.arange(64.0).view(8, 8)


@pytest.mark.parametrize(
    ("placements", "layout", "shape"),
    [
        ((Replicate(), Shard(0)), (("model",),), (4, 8)),
        ((Shard(1), Replicate()), ((), ("data",)), (8, 4)),
        ((Shard(0), Shard(1)), (("data",), ("model",)), (4, 4)),
        ((Shard(0), Shard(0)), (("data", "model"),), (2, 8)),
        ((Replicate(), Replicate()), (), (8, 8)),
    ],
)
def test_the_layout_and_the_part(
    mesh: DeviceMesh, placements: Sequence[Any], layout: Any, shape: tuple[int, ...]
) -> None:
    weight = distribute_tensor(WEIGHT, mesh["data", "model"], placements, src_data_rank=None)
    found = captured(weight)
    (leaf,) = found.leaves
    assert (leaf.layout, leaf.type) == (layout, TensorType(f32, shape))
    assert torch.equal(found.read_leaves()["weight"], weight.to_local())
    (_, grad), *_ = found.graph.outputs_of("param_grad")
    assert grad.type == leaf.type
    packed = found.pack_grads({"weight": torch.ones(shape)})["weight"]
    assert isinstance(packed, DTensor)
    assert (packed.placements, packed.shape) == (tuple(placements), (8, 8))
    assert torch.equal(found.flatten_params({"weight": weight})["weight"], weight.to_local())


def refused(weight: Tensor, message: str, mesh: Mesh | None = MESH) -> None:
    with pytest.raises(PlaitError, match=message):
        captured(weight, mesh)


def test_parts_of_unequal_sizes(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.ones(7, 8), mesh["model"], [Shard(0)], src_data_rank=None)
    refused(weight, r"'weight' of the model, a DTensor: dim 0 .*does not divide: 7 by 2")


def test_partial_sums(mesh: DeviceMesh) -> None:
    weight = DTensor.from_local(WEIGHT, mesh["model"], [Partial()], run_check=False)
    refused(weight, r"has placement .*: a parameter or a buffer must be .* redistribute it")


def test_no_mesh(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(WEIGHT, mesh["model"], [Shard(0)], src_data_rank=None)
    refused(weight, r"'weight' of the model, a DTensor over process group .*pass mesh=", None)


def test_a_mesh_that_has_no_such_axis(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(WEIGHT, mesh["model"], [Shard(0)], src_data_rank=None)
    refused(weight, "do not stand along an axis", Mesh({"stage": 2, "model": 4}))


def test_the_axis_of_the_stages(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(WEIGHT, mesh["stage"], [Shard(0)], src_data_rank=None)
    refused(weight, "along 'stage', the axis of the stages")


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_random_numbers_differ_where_a_tensor_is_cut(mesh: DeviceMesh, placement: Any) -> None:
    def loss_fn(model: Matrix, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = DTensor.from_local(x, mesh["model"], [Replicate()], run_check=False)
        dropped = torch.dropout(whole.redistribute(placements=[placement]), 0.5, True)
        return model(x).square().mean(), dropped.to_local()

    model, x = Matrix(WEIGHT), torch.ones(8, 8)
    found = capture(loss_fn, model, x, num_microbatches=1, mesh=MESH, split=None, has_aux=True)
    given = [to_numpy(WEIGHT), to_numpy(x), np.zeros(2, np.uint32), np.float32(1)]
    results = interpret_ranks(verify(found.graph), [given] * 8, MESH.axes)
    (position,) = [n for n, port in enumerate(found.graph.output_ports) if port.role == "aux"]
    drawn = {
        tuple(place.items()): r[position] for place, r in zip(MESH.places(), results, strict=True)
    }
    kinds = {place[-1]: mask.tobytes() for place, mask in drawn.items()}
    assert all(mask.tobytes() == kinds[place[-1]] for place, mask in drawn.items())
    assert len(set(kinds.values())) == (1 if placement.is_replicate() else 2)
    assert all(set(np.unique(mask)) == {0.0, 2.0} for mask in drawn.values())
