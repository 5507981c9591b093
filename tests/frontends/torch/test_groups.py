"""Process groups and the axes of a mesh, in a process that stands for one of eight ranks; what is refused."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from plait.core_ir.errors import CaptureError, PlaitError, UnsupportedError
from plait.core_ir.mesh import Mesh
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture
from plait.frontends.torch.groups import axes_of

MESH = Mesh({"stage": 2, "data": 2, "model": 2})


@pytest.fixture(params=[0, 5])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of eight ranks that exist in name only."""
    dist.init_process_group("fake", rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def captured(function: Any, mesh: Mesh | None = MESH) -> Captured:
    def loss_fn(model: Scaled, batch: Tensor) -> Tensor:
        return function(batch * model.scale).sum()

    return capture(loss_fn, Scaled(), torch.ones(4, 4), num_microbatches=1, mesh=mesh, split=None)


def summed(group: Any) -> Any:
    return lambda x: functional.all_reduce(x, "sum", group)


@pytest.mark.usefixtures("rank")
def test_groups_of_a_device_mesh_are_known_by_their_members() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))
    assert axes_of(mesh.get_group("data"), MESH, "a sum") == ("data",)
    assert axes_of(mesh.get_group("model"), MESH, "a sum") == ("model",)
    both = mesh["data", "model"]._flatten("both")
    assert axes_of(both.get_group(), MESH, "a sum") == ("data", "model")


@pytest.mark.usefixtures("rank")
def test_groups_made_by_hand_are_known_by_their_members(rank: int) -> None:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in MESH.groups(("model",))}
    own = next(group for ranks, group in groups.items() if rank in ranks)
    graph = captured(summed(own)).graph
    (start, *_) = (e for e in graph.eqns if e.op.name == "all_reduce")
    assert dict(start.attrs) == {"axis": "model", "size": 2, "reduction": "sum"}


@pytest.mark.usefixtures("rank")
def test_the_axes_that_a_model_names() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))
    assert captured(summed(mesh.get_group("model"))).named_axes == {"model"}
    assert captured(lambda x: x).named_axes == set()


def test_a_group_of_one_rank_needs_no_axis(rank: int) -> None:
    alone = [dist.new_group([member]) for member in range(8)][rank]
    whole = captured(summed(alone))
    assert whole.named_axes == set()
    assert "all_reduce" not in {e.op.name for e in whole.graph.eqns}
    assert captured(summed(alone), None).named_axes == set()


def refused(function: Any, message: str, mesh: Mesh | None = MESH) -> None:
    with pytest.raises(PlaitError) as raised:
        captured(function, mesh)
    assert re.search(message, str(raised.value)), raised.value
    assert "test_groups.py" in str(raised.value)


def test_a_group_that_is_along_no_axis(rank: int) -> None:
    odd = dist.new_group(sorted({rank, 6, 7}))
    refused(summed(odd), "do not stand along an axis of the mesh .*'plait:AXIS'")


@pytest.mark.usefixtures("rank")
def test_a_group_without_a_mesh() -> None:
    refused(summed(dist.group.WORLD), r"but no mesh is given; pass mesh=", None)


@pytest.mark.usefixtures("rank")
def test_the_axis_of_the_stages() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "rest"))
    refused(summed(mesh.get_group("stage")), "along 'stage', the axis of the stages")


@pytest.mark.usefixtures("rank")
def test_an_axis_that_the_mesh_has_in_another_size() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))
    other = Mesh({"stage": 2, "model": 4})
    refused(summed(mesh.get_group("model")), "do not stand along an axis of the mesh", other)


@pytest.mark.usefixtures("rank")
def test_a_run_of_another_number_of_ranks() -> None:
    with pytest.raises(PlaitError, match=r"is of 4 ranks, the run of 8; .*\"fake\""):
        captured(summed(dist.group.WORLD), Mesh({"stage": 2, "data": 2}))


@pytest.mark.usefixtures("rank")
def test_sizes_that_depend_on_data() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))

    def routed(x: Tensor) -> Tensor:
        sizes = [int(n) for n in (x > 0).sum(1)[:2]]
        return functional.all_to_all_single_autograd(x, sizes, sizes, mesh.get_group("model"))

    with pytest.raises(
        CaptureError, match=r"test_groups.py:\d+: the value .*pad the parts that ranks exchange"
    ):
        captured(routed)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(
    "call",
    [
        lambda x, group: dist.broadcast(x.detach(), 0),
        lambda x, group: dist.all_gather_object([None] * 8, 1),
        lambda x, group: dist.barrier(),
    ],
)
def test_other_collectives(call: Any) -> None:
    def function(x: Tensor) -> Tensor:
        call(x, dist.group.WORLD)
        return x

    with pytest.raises(PlaitError):
        captured(function)


@pytest.mark.usefixtures("rank")
def test_a_collective_by_another_name_than_its_full_one() -> None:
    def function(x: Tensor) -> Tensor:
        summing(x.detach())
        return x

    refused(function, "cannot be captured as it is called here.*by this full name")


summing = dist.all_reduce


def test_a_collective_that_was_imported_by_its_name(rank: int) -> None:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in MESH.groups(("model",))}
    own = next(group for ranks, group in groups.items() if rank in ranks)

    def function(x: Tensor) -> Tensor:
        y = x.detach().clone()
        all_reduce(y, group=own)
        return x * y

    assert captured(function).named_axes == {"model"}


all_reduce = dist.all_reduce  # as an import of the function leaves it


@pytest.mark.usefixtures("rank")
def test_parts_of_unequal_sizes() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))
    exchange = functional.all_to_all_single_autograd
    with pytest.raises(UnsupportedError, match=r"unequal sizes .*a capacity for each rank"):
        captured(lambda x: exchange(x, [3, 1], [1, 3], mesh.get_group("model")))


@pytest.mark.usefixtures("rank")
def test_messages_that_are_no_ring(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "data", "model"))
    group = mesh.get_group("model")

    def function(x: Tensor) -> Tensor:
        got = torch.empty(3)
        messages = [
            dist.P2POp(dist.isend, x.detach(), group=group, group_peer=1),
            dist.P2POp(dist.irecv, got, group=group, group_peer=1),
        ]
        dist.batch_isend_irecv(messages)
        return x * got.sum()

    refused(function, "must be those of a ring")


@pytest.mark.usefixtures("rank")
def test_a_message_by_itself() -> None:
    def function(x: Tensor) -> Tensor:
        dist.send(x.detach(), 1)
        return x

    with pytest.raises(PlaitError):
        captured(function)
