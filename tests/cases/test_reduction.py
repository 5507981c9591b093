"""Public cases about what a loss and a gradient are: R42 (sum and mean) and R43 (several steps)."""

from typing import Any

import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree, runs
from torch import nn

import plait

X = [1.0, 2.0, 3.0, 4.0]


def mean_square(p: Any, batch: Any) -> Any:
    h = plait.stage_boundary(batch["x"] * p["w"])
    return (h * h).mean()


def sum_square(p: Any, batch: Any) -> Any:
    h = plait.stage_boundary(batch["x"] * p["w"])
    return (h * h).sum()


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@runs()
def test_r42_sum_and_mean(run: Run, num_microbatches: int) -> None:
    batch = {"x": run.array(X)}
    for loss_fn, reduction, loss, grad in (
        (sum_square, "sum", 30.0, 60.0),
        (mean_square, "mean", 7.5, 15.0),
    ):
        pipeline = run.compile(
            loss_fn,
            run.model({"w": 1.0}),
            batch,
            num_microbatches=num_microbatches,
            reduction=reduction,
        )
        got_loss, grads = numpy_tree(pipeline.loss_and_grads(batch))
        assert got_loss == loss
        assert grads["w"] == grad
        assert numpy_tree(pipeline.forward(batch)) == loss


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_r43_gradients_add_up_over_steps(schedule: str) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(1.0))})
    batch = {"x": torch.tensor(X)}
    pipeline = plait.compile(
        mean_square, model, batch, num_microbatches=4, schedule=schedule, codegen="eager"
    )
    pipeline.step(batch)
    pipeline.step(batch)
    assert model["w"].grad == 30
    pipeline.step(batch)
    assert model["w"].grad == 45
    model["w"].grad = torch.tensor(100.0)
    pipeline.step(batch)
    assert model["w"].grad == 115


@runs(schedules=("1f1b",))
def test_no_array_of_the_caller_changes(run: Run) -> None:
    batch = {"x": run.array(X)}
    model = run.model({"w": 1.0})
    pipeline = run.compile(mean_square, model, batch, num_microbatches=2)
    first = numpy_tree(pipeline.loss_and_grads(batch))
    second = numpy_tree(pipeline.loss_and_grads(batch))
    np.testing.assert_array_equal(first[0], second[0])
    assert plait.to_numpy(model["w"]) == 1
    np.testing.assert_array_equal(plait.to_numpy(batch["x"]), np.float32(X))
