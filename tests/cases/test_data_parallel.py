"""A mesh with a data axis: the results of a pipeline with as many more microbatches, from both frontends."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree
from torch import nn

import plait

NUM_MICROBATCHES = 4
X = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
PARAMS = {f"w{s}": np.random.default_rng(s).normal(size=(3, 3)) for s in range(4)}


def loss_fn(p: Any, batch: Any) -> tuple[Any, Any]:
    """Four stages; the first's parameter is the last's too; aux is one number for each row."""
    tanh = torch.tanh if isinstance(batch["x"], torch.Tensor) else jnp.tanh
    h = batch["x"]
    for stage in range(4):
        h = tanh(h @ p[f"w{stage}"])
        h = plait.stage_boundary(h) if stage < 3 else h @ p["w0"]
    return (h * h).mean() * batch["scale"], (h * h).sum(-1)


def compiled(run: Run, num_microbatches: int, **options: Any) -> tuple[plait.Pipeline, Any]:
    batch = {"x": run.array(X), "scale": 2.0}
    model = run.model(PARAMS)
    pipeline = run.compile(
        loss_fn, model, batch, num_microbatches=num_microbatches, has_aux=True, **options
    )
    return pipeline, batch


def check_equal(run: Run, mesh: dict[str, int], reduction: str = "mean") -> None:
    """AssertionError unless replicas give what a pipeline with as many more microbatches gives."""
    ranks, parts = mesh["stage"], math.prod(mesh.values()) // mesh["stage"]
    pipeline, batch = compiled(run, NUM_MICROBATCHES, mesh=mesh, reduction=reduction)
    assert pipeline.schedule.num_microbatches == NUM_MICROBATCHES
    (loss, aux), grads = numpy_tree(pipeline.loss_and_grads(batch))
    whole, _ = compiled(run, NUM_MICROBATCHES * parts, num_ranks=ranks, reduction=reduction)
    (wanted_loss, wanted_aux), wanted = numpy_tree(whole.loss_and_grads(batch))
    np.testing.assert_array_equal(aux, wanted_aux)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("engine", ["local", "mpmd"])
@pytest.mark.parametrize("source", ["torch", "jax"])
def test_replicas_equal_more_microbatches(
    source: str, engine: str, schedule: str, reduction: str
) -> None:
    ranks = 4 if schedule == "1f1b" else 2
    check_equal(Run(source, engine, schedule), {"stage": ranks, "data": 2}, reduction)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_replicas_in_one_program(schedule: str) -> None:
    ranks = 4 if schedule == "1f1b" else 2
    check_equal(Run("jax", "spmd", schedule), {"stage": ranks, "data": 2})


@pytest.mark.parametrize("engine", ["local", "mpmd", "spmd"])
def test_two_axes_of_replicas(engine: str) -> None:
    check_equal(Run("jax", engine, "dualpipev"), {"data": 2, "stage": 2, "twin": 2})


@pytest.mark.parametrize("engine", ["local", "mpmd", "spmd"])
def test_random_numbers_go_by_the_part_of_a_microbatch(engine: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    batch = torch.tensor(X)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    results = []
    for count, mesh in ((4, {"stage": 2, "data": 2}), (8, {"stage": 2})):
        pipeline = Run("torch", engine, "1f1b").compile(
            loss, model, batch, split=["2"], num_microbatches=count, mesh=mesh
        )
        results.append(numpy_tree(pipeline.loss_and_grads(batch, step=3)))
    (replicated, grads), (plain, wanted) = results
    np.testing.assert_allclose(replicated, plain, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("source", ["torch", "jax"])
def test_replicas_have_devices_of_their_own(source: str) -> None:
    pipeline, batch = compiled(
        Run(source, "mpmd", "zbv"), NUM_MICROBATCHES, mesh={"data": 2, "stage": 2}
    )
    placed = pipeline.engine._placed  # type: ignore[attr-defined]
    ids = [[device.id for device in submesh.devices] for submesh in placed]
    assert ids == [[0, 2], [1, 3], [1, 3], [0, 2]]
    (loss, _), grads = pipeline.loss_and_grads(batch)
    assert len({next(iter(g.devices())) for g in grads.values()}) == 1
    assert isinstance(loss, jax.Array)


def test_meshes_of_both_frameworks_are_read() -> None:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("rows", "pipe"))
    pipeline, batch = compiled(
        Run("jax", "mpmd", "zbv"), NUM_MICROBATCHES, mesh=mesh, stage_axis="pipe"
    )
    assert pipeline.schedule.num_ranks == 2
    assert numpy_tree(pipeline.loss_and_grads(batch))


def test_an_axis_of_one_is_no_replica() -> None:
    pipeline, _ = compiled(Run("jax", "spmd", "zbv"), 4, mesh={"stage": 2, "data": 1})
    assert pipeline.schedule.num_ranks == 2


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"data": 2}}, "axes data, but no axis 'stage' for the stages"),
        ({"mesh": {"stage": 2, "data": 0}}, "axis 'data' must have an integer size of at least 1"),
        ({"mesh": {"stage": 2, 3: 1}}, "name of an axis must be a string, got 3"),
        ({"mesh": [2, 2]}, "mesh must be a dict of axis sizes .*got builtins.list"),
        ({"stage_axis": "pipe"}, "stage_axis='pipe' names an axis of a mesh; pass mesh= too"),
        ({"mesh": {"stage": 2}, "num_ranks": 4}, "num_ranks is 4, but the mesh has 2 ranks"),
        ({"mesh": {"stage": 3, "data": 2}}, "4 stages cannot be put on 3 ranks"),
        (
            {"mesh": {"stage": 2, "data": 3}},
            r"num_microbatches=12 does not divide.*these are 4 microbatches, each cut into 3 parts over data",
        ),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(plait.PlaitError, match=message):
        compiled(Run("jax", "mpmd", "zbv"), NUM_MICROBATCHES, **options)


def test_a_buffer_that_changes_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with pytest.raises(plait.PlaitError, match=r"buffer '1\.running_mean' changes from microbatch"):
        plait.compile(
            lambda model, x: model(x).square().mean(),
            model,
            torch.tensor(X),
            split=["2"],
            num_microbatches=4,
            mesh={"stage": 2, "data": 2},
            codegen="eager",
        )
