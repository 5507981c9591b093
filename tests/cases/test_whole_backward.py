"""Programs whose backwards no pass has split: B in one piece, the same gradients under every schedule."""

from typing import Any

import numpy as np
import pytest
import torch
from case_runs import ENGINES, Run, numpy_tree
from torch import nn

import plait
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.frontends.torch.reference import reference
from plait.passes import PROGRAM_PASSES, Passes, Sharding, split_backward

WHOLE = tuple(one for one in PROGRAM_PASSES if one is not split_backward)
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    """Four stages, of which the last two share a layer."""
    torch.manual_seed(1)
    shared = nn.Linear(6, 6)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), shared, nn.Tanh(), shared
    )


def loss_fn(model: Any, x: Any) -> Any:
    for number, layer in enumerate(model):
        x = layer(plait.stage_boundary(x) if number in (2, 4, 6) else x)
    return x.square().mean()


@pytest.mark.parametrize("program", [(), WHOLE], ids=["no passes", "not split"])
@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipev", "interleaved-1f1b"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients(engine: str, schedule: str, program: Any) -> None:
    model = build()
    pipeline = Run("torch", engine, schedule).compile(
        loss_fn, model, X, num_microbatches=4, passes=Passes(program=program)
    )
    loss, grads = numpy_tree(pipeline.loss_and_grads(X))
    wanted = reference(loss_fn, model, X, num_microbatches=4)
    limit = tolerance("f32", "framework" if engine == "local" else "backends")
    assert relative_error(loss, wanted.loss) <= limit.loss
    assert gradient_error(grads, wanted.grads) <= limit.grads
    assert not pipeline.program.task(1, "W").eqns
    assert np.isfinite(pipeline.simulate().makespan)


def test_shards() -> None:
    model = build()
    passes = Passes(program=WHOLE, sharding=Sharding("data"))
    pipeline = Run("torch", "local", "dualpipev").compile(
        loss_fn, model, X, num_microbatches=4, passes=passes, mesh={"stage": 2, "data": 2}
    )
    loss, grads = numpy_tree(pipeline.loss_and_grads(X))
    wanted = reference(loss_fn, model, X, num_microbatches=8)
    assert relative_error(loss, wanted.loss) <= 1e-6
    assert gradient_error(grads, wanted.grads) <= 1e-5
