"""Every schedule on every engine: the bits of running microbatches one after the other, and the right numbers."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree

import plait
from plait.core_ir.schedule import ranks_for, recipes

NAMES = [recipe.name for recipe in recipes()]
FAST_ENGINES = ("local", "mpmd")


def stages_for(name: str, num_ranks: int) -> int:
    """Stages that fill the ranks."""
    return next(
        n for n in range(1, 5 * num_ranks) if n % num_ranks == 0 and _fits(name, n, num_ranks)
    )


def _fits(name: str, num_stages: int, num_ranks: int) -> bool:
    try:
        return ranks_for(name, num_stages) == num_ranks
    except plait.PlaitError:
        return False


def make_loss(num_stages: int) -> Any:
    def loss_fn(p: Any, batch: Any) -> Any:
        h = batch["x"]
        for stage in range(num_stages):
            if stage:
                h = plait.stage_boundary(h)
            tanh = torch.tanh if isinstance(h, torch.Tensor) else jnp.tanh
            h = tanh(h @ p[f"w{stage}"])
        return (h * h).mean()

    return loss_fn


def parameters(num_stages: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"w{s}": rng.normal(size=(3, 3)).astype(np.float32) for s in range(num_stages)}


def run_once(run: Run, num_ranks: int, num_stages: int, num_microbatches: int) -> Any:
    x = np.random.default_rng(1).normal(size=(2 * num_microbatches, 3)).astype(np.float32)
    batch = {"x": run.array(x)}
    pipeline = run.compile(
        make_loss(num_stages),
        run.model(parameters(num_stages)),
        batch,
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
    )
    assert pipeline.schedule.num_ranks == num_ranks
    return numpy_tree(pipeline.loss_and_grads(batch))


def reference(num_stages: int, num_microbatches: int) -> tuple[float, dict[str, Any]]:
    x = np.random.default_rng(1).normal(size=(2 * num_microbatches, 3)).astype(np.float32)
    p = {
        n: torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for n, v in parameters(num_stages).items()
    }
    loss = make_loss(num_stages)(p, {"x": torch.tensor(x, dtype=torch.float64)})
    loss.backward()
    return float(loss.detach()), {n: t.grad.numpy() for n, t in p.items()}  # type: ignore[union-attr]


def check(name: str, engine: str, num_ranks: int, num_microbatches: int) -> None:
    num_stages = stages_for(name, num_ranks)
    loss, grads = run_once(Run("jax", engine, name), num_ranks, num_stages, num_microbatches)
    plain_loss, plain = run_once(
        Run("jax", engine, "gpipe"), num_stages, num_stages, num_microbatches
    )
    assert loss.tobytes() == plain_loss.tobytes()
    wanted_loss, wanted = reference(num_stages, num_microbatches)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for key, grad in grads.items():
        assert grad.tobytes() == plain[key].tobytes(), key
        np.testing.assert_allclose(grad, wanted[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_microbatches", [4, 9])
@pytest.mark.parametrize("engine", FAST_ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks(name: str, engine: str, num_microbatches: int) -> None:
    check(name, engine, 2, num_microbatches)


@pytest.mark.parametrize("engine", FAST_ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_four_ranks(name: str, engine: str) -> None:
    check(name, engine, 4, 8)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (2, 9), (4, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_one_program(name: str, num_ranks: int, num_microbatches: int) -> None:
    check(name, "spmd", num_ranks, num_microbatches)


# After profiling, `auto` goes on under an order for the measured times.

MEASURED = plait.Times(f=[1, 3, 1, 1], i=[1, 1, 2, 1], w=[1, 1, 1, 3], comm=0.5)


@pytest.mark.parametrize("engine", ["local", "mpmd", "spmd"])
def test_auto_is_searched_again_for_measured_times(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, count = Run("jax", engine, "auto"), 6
    x = np.random.default_rng(1).normal(size=(2 * count, 3)).astype(np.float32)
    batch, model = {"x": run.array(x)}, run.model(parameters(4))
    pipeline = run.compile(make_loss(4), model, batch, num_microbatches=count, num_ranks=2)
    before, schedule = numpy_tree(pipeline.loss_and_grads(batch)), pipeline.schedule
    monkeypatch.setattr(pipeline.engine, "profile", lambda inputs: MEASURED)
    pipeline.profile(batch)
    assert pipeline.schedule != schedule
    assert pipeline.schedule.placement == schedule.placement
    assert pipeline.simulate().makespan < schedule.simulate(MEASURED).makespan
    after = numpy_tree(pipeline.loss_and_grads(batch))
    assert before[0].tobytes() == after[0].tobytes()
    assert {n: g.tobytes() for n, g in before[1].items()} == {
        n: g.tobytes() for n, g in after[1].items()
    }


def test_a_schedule_that_was_handed_in_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("jax", "local", "auto")
    batch = {"x": run.array(np.ones((12, 3)))}
    given = plait.schedule("auto", 2, 6, stages_per_rank=2)
    pipeline = run.compile(
        make_loss(4), run.model(parameters(4)), batch, num_microbatches=6, schedule=given
    )
    monkeypatch.setattr(pipeline.engine, "profile", lambda inputs: MEASURED)
    pipeline.profile(batch)
    assert pipeline.schedule is given


# R34: fewer microbatches than stages, or only one.


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_r34_few_microbatches(name: str, num_ranks: int, num_microbatches: int) -> None:
    if name == "dualpipev" and num_microbatches < 2 * num_ranks:
        with pytest.raises(plait.PlaitError, match=rf"dualpipev.*{2 * num_ranks}"):
            check(name, "local", num_ranks, num_microbatches)
        return
    check(name, "local", num_ranks, num_microbatches)
