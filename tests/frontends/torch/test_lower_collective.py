"""Functional collectives as gloo ranks run them, and as they are lowered; what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from process_group import run_ranks

from plait.backends.torch.mesh_groups import name_axis_group, release_axis
from plait.core_ir.errors import PlaitError, UnsupportedError
from plait.core_ir.graph import Graph
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh

DATA: Any = "plait:data"
MESH = Mesh({"stage": 1, "data": 2})
X = torch.ones(4, 6)


def test_lowered_collectives_give_what_ranks_give() -> None:
    script = Path(__file__).with_name("collective_runs.py")
    for rank, finished in enumerate(run_ranks(script, [], 2)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    """A process group of two ranks that exists in name only."""
    dist.init_process_group("fake", rank=0, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    name_axis_group("data", world)
    yield
    release_axis("data")
    dist.destroy_process_group()


Lowered = Callable[..., Graph]


@pytest.mark.usefixtures("two_ranks")
def test_each_start_is_followed_by_its_wait_and_names_the_axis(lowered: Lowered) -> None:
    def both(x: torch.Tensor) -> Any:
        return functional.all_reduce(x, "avg", DATA), functional.all_to_all_single(
            x, None, None, DATA
        )

    eqns = lowered(both, [X], MESH).eqns
    names = [eqn.op.name for eqn in eqns]
    assert names[:2] == ["all_reduce", "wait"]
    assert names[-2:] == ["all_to_all", "wait"]
    assert "div" in names
    assert dict(eqns[0].attrs) == {"axis": "data", "size": 2, "reduction": "sum"}
    assert eqns[-2].attrs["size"] == 2


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "plait:model"),
            "'plait:model', which this process has not made",
        ),
        (
            lambda x: functional.all_to_all_single(x, [3, 1], [1, 3], DATA),
            r"parts of unequal sizes \(\[1, 3\] sent, \[3, 1\] received\)",
        ),
        (lambda x: functional.all_reduce(x, "bor", DATA), "reduction 'bor'; known are sum"),
        (lambda x: functional.all_reduce(x.int(), "avg", DATA), "'avg' of i32"),
        (
            lambda x: functional.broadcast(x, 0, DATA),
            "_c10d_functional.broadcast.default communicates between ranks and has no lowering",
        ),
    ],
)
def test_what_is_refused(lowered: Lowered, function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        lowered(function, [X], MESH)


@pytest.mark.usefixtures("two_ranks")
def test_a_sum_of_bool_is_refused_by_the_op(lowered: Lowered) -> None:
    with pytest.raises(PlaitError, match="all_reduce: C2"):
        lowered(lambda x: functional.all_reduce(x > 0, "sum", DATA), [X], MESH)


@pytest.mark.usefixtures("two_ranks")
def test_numbers_are_gathered_into_a_vector(lowered: Lowered) -> None:
    """As torch types it; gloo itself refuses to."""
    gather = lambda x: functional.all_gather_single(x, 0, DATA)  # noqa: E731
    graph = lowered(gather, [torch.tensor(1.0)], MESH)
    key = np.zeros(2, np.uint32)
    ranks = [[np.float32(rank), key] for rank in range(2)]
    assert [y.tolist() for (y,) in interpret_ranks(graph, ranks, {"data": 2})] == [[0, 1]] * 2
