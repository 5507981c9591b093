"""Models that ask for their rank: one program for all ranks, or an error with the line and both values.

The process stands for one of sixteen ranks; what the others compute is torch's own result with their numbers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import CaptureError
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh
from plait.core_ir.verify import verify
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture

MESH = Mesh({"stage": 2, "data": 2, "model": 4})
X = torch.arange(32.0).view(4, 8) / 32

Loss = Callable[[nn.Module, Tensor, int], Tensor]
"""The loss of a rank, by its place along `model`."""


@pytest.fixture(name="mesh", scope="module", params=[0, 11])
def _mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """The mesh of sixteen ranks that exist in name only."""
    dist.init_process_group("fake", rank=request.param, world_size=16)
    yield init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("stage", "data", "model"))
    dist.destroy_process_group()


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).view(8, 8).sin())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def captured(loss_fn: Callable[[Any, Any], Any]) -> Captured:
    return capture(loss_fn, Matrix(), X, num_microbatches=1, mesh=MESH, split=None)


def by_chunk(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return (model(x).chunk(4, -1)[place] * torch.arange(1.0, 3)).square().sum()


def by_narrow(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return (model(x).narrow(1, 2 * place, 2) * torch.arange(1.0, 3)).square().sum()


def by_slice_backwards(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return model(x)[:, 6 - 2 * place : 8 - 2 * place].pow(3).sum()


def by_index(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return model(x).view(4, 4, 2)[:, place].pow(3).sum()


def by_stride(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return model(x)[:, place : 5 + place : 2].pow(3).sum()


def by_offset(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return (model(x) * (torch.arange(8) + 8 * place)).square().sum()


def by_number(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return (model(x) * (0.25 + 0.5 * place)).square().sum()


def by_tensor(model: nn.Module, x: Tensor, place: int) -> Tensor:
    return (model(x) * torch.tensor([1.0, place]).repeat(4)).square().sum()


def by_mask(model: nn.Module, x: Tensor, place: int) -> Tensor:
    columns = torch.arange(8)
    return model(x).masked_fill((columns < 2 * place) | (columns >= 2 * place + 2), 0).pow(2).sum()


LINEAR = [
    by_chunk,
    by_narrow,
    by_slice_backwards,
    by_index,
    by_stride,
    by_offset,
    by_number,
    by_tensor,
    by_mask,
]


@pytest.mark.parametrize("loss", LINEAR)
def test_one_program_for_all_ranks(mesh: DeviceMesh, loss: Loss) -> None:
    group = mesh.get_group("model")
    found = captured(lambda model, x: loss(model, x, dist.get_rank(group)))
    assert found.named_axes == {"model"}
    model = Matrix()
    given = [to_numpy(model.weight.detach()), to_numpy(X), np.zeros(2, np.uint32), np.float32(1)]
    results = interpret_ranks(verify(found.graph), [given] * 16, MESH.axes)
    for place, (got_loss, got_grad) in zip(MESH.places(), results, strict=True):
        model.zero_grad()
        wanted = loss(model, X, place["model"])
        wanted.backward()  # type: ignore[no-untyped-call]
        assert model.weight.grad is not None
        np.testing.assert_allclose(got_loss, wanted.item(), rtol=1e-5)
        np.testing.assert_allclose(got_grad, to_numpy(model.weight.grad), rtol=1e-5, atol=1e-5)


def asking(mesh: DeviceMesh) -> dict[str, Callable[[], int]]:
    group = mesh.get_group("model")
    return {
        "a group": lambda: group.rank(),
        "get_rank": lambda: dist.get_rank(group),
        "imported": lambda: get_rank(group),
        "the world": lambda: dist.get_rank() % 4,
        "number in the group": lambda: dist.get_group_rank(group, dist.get_rank()),
        "get_local_rank": lambda: mesh.get_local_rank("model"),
        "of a submesh": lambda: mesh["model"].get_local_rank(),
        "get_coordinate": lambda: mesh.get_coordinate()[2],  # type: ignore[index]
    }


@pytest.mark.parametrize(
    "how",
    [
        "a group",
        "get_rank",
        "imported",
        "the world",
        "number in the group",
        "get_local_rank",
        "of a submesh",
        "get_coordinate",
    ],
)
def test_ways_to_ask(mesh: DeviceMesh, how: str) -> None:
    place = asking(mesh)[how]
    before = place(), dist.get_rank(), mesh.get_coordinate()
    found = captured(lambda model, x: by_offset(model, x, place()))
    assert found.named_axes == {"model"}
    assert (place(), dist.get_rank(), mesh.get_coordinate()) == before


def test_two_axes(mesh: DeviceMesh) -> None:
    """A slice whose start depends on both."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        data, place = mesh.get_local_rank("data"), mesh.get_local_rank("model")
        return model(x)[2 * data : 2 * data + 2, 2 * place : 2 * place + 2].square().sum()

    found = captured(loss_fn)
    assert found.named_axes == {"data", "model"}
    y = to_numpy(Matrix()(X).detach())
    given = [to_numpy(Matrix().weight.detach()), to_numpy(X), np.zeros(2, np.uint32), np.float32(1)]
    results = interpret_ranks(found.graph, [given] * 16, MESH.axes)
    for place, (loss, _) in zip(MESH.places(), results, strict=True):
        rows, columns = 2 * place["data"], 2 * place["model"]
        part = y[rows : rows + 2, columns : columns + 2]
        np.testing.assert_allclose(loss, (part**2).sum(), rtol=1e-5)


def test_a_rank_that_changes_nothing(mesh: DeviceMesh) -> None:
    seen = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(dist.get_rank())
        return model(x).square().sum()

    assert captured(loss_fn).named_axes == set()
    assert {0, 8, 4, 1, 3} <= set(seen)  # the first rank, and the second and the last along an axis


def refused(loss_fn: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(loss_fn)


def test_a_branch(mesh: DeviceMesh) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if mesh.get_local_rank("model") == 0:
            y = y.sin()
        return y.sum()

    refused(loss_fn, r"test_places.py:\d+: ranks would run different programs: .*sin.*model=0")


def test_numbers_that_are_not_linear(mesh: DeviceMesh) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, : 1 + mesh.get_local_rank("model") ** 2 % 4].sum()

    refused(loss_fn, r"test_places.py:\d+: ranks would run different programs: .* at .*model=\d")


def test_a_step_that_is_not_the_same_from_rank_to_rank(mesh: DeviceMesh) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * mesh.get_local_rank("model") ** 2).sum()

    refused(
        loss_fn, r"constant value=\S+ on the rank at .*, constant value=\S+ at .*by the same step"
    )


def test_other_shapes(mesh: DeviceMesh) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[:, : 1 + mesh.get_local_rank("model")].square().sum()

    refused(loss_fn, "ranks would run different programs")


def test_the_axis_of_the_stages(mesh: DeviceMesh) -> None:
    refused(
        lambda model, x: by_number(model, x, dist.get_rank()),
        r"test_places.py:\d+: a number depends on the rank's place along 'stage'",
    )


def test_other_collectives_on_other_ranks(mesh: DeviceMesh) -> None:
    group = mesh.get_group("model")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        if dist.get_rank(group) == 3:
            z = y.detach().clone()
            dist.all_reduce(z, group=group)
            y = y + z
        return y.sum()

    refused(loss_fn, "ranks would run different programs")
