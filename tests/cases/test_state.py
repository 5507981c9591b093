"""What depends on the microbatch itself: BatchNorm statistics, dropout, JAX state and keys; each replayed in order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from case_runs import ENGINES, SCHEDULES, Run, numpy_tree
from torch import nn

import plait


class Net(nn.Module):
    """Two convolutions with BatchNorm, then a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3))
        self.head = nn.Linear(3 * 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)).flatten(1))


def net_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def net_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(6, 2, 4, 4, generator=generator),
        "y": torch.randn(6, 2, generator=generator),
    }


def replay(model: nn.Module, batch: dict[str, torch.Tensor], count: int) -> float:
    total = 0.0
    for index in range(count):
        part = {k: v.chunk(count)[index] for k, v in batch.items()}
        loss = net_loss(model, part) / count
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batch_norm_statistics_follow_the_microbatches_in_order(schedule: str) -> None:
    model, reference, batch = Net(), Net(), net_batch()
    pipeline = plait.compile(
        net_loss,
        model,
        batch,
        split=["second", "head"],
        schedule=schedule,
        num_microbatches=3,
        codegen="eager",
    )
    for _ in range(2):
        loss = pipeline.step(batch)
        wanted = replay(reference, batch, 3)
        assert float(loss) == pytest.approx(wanted, rel=1e-5)
    for (name, buffer), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=1e-5, atol=1e-6, msg=name)
    largest = max(float(p.grad.abs().max()) for p in reference.parameters())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_batch_norm_of_a_torch_model_on_the_jax_backend(engine: str) -> None:
    model, reference, batch = Net(), Net(), net_batch()
    pipeline = plait.compile(
        net_loss,
        model,
        batch,
        split=["second", "head"],
        num_microbatches=3,
        backend="jax",
        engine=engine,
    )
    pipeline.loss_and_grads(batch)
    replay(reference, batch, 3)
    for name, buffer in reference.named_buffers():
        np.testing.assert_allclose(pipeline.state[name], buffer, rtol=1e-5, atol=1e-6)
    for buffer in model.buffers():  # the caller's arrays are left alone
        assert buffer.abs().sum() in (0, 3)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 64)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.first(x)))


def dropped_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def test_dropout_is_by_key_the_same_on_every_schedule_and_backend() -> None:
    batch = {"x": torch.randn(8, 8)}
    results = {}
    for engine, backend in ENGINES.items():
        for schedule in SCHEDULES:
            options = {"codegen": "eager"} if backend == "torch" else {}
            pipeline = plait.compile(
                dropped_loss,
                Dropped(),
                batch,
                split=["second"],
                schedule=schedule,
                num_microbatches=4,
                backend=backend,
                engine=engine,
                seed=7,
                **options,
            )
            results[engine, schedule] = numpy_tree(pipeline.loss_and_grads(batch, step=3))
            other_step = numpy_tree(pipeline.loss_and_grads(batch, step=4))
            assert other_step[0] != results[engine, schedule][0]
    first_loss, first_grads = results["local", "gpipe"]
    for loss, grads in results.values():
        np.testing.assert_allclose(loss, first_loss, rtol=1e-5)
        for name, grad in grads.items():
            scale = np.abs(first_grads[name]).max()
            np.testing.assert_allclose(grad, first_grads[name], rtol=1e-4, atol=1e-5 * scale)


def test_dropout_drops_its_share_and_rescales() -> None:
    """With weights of one, the output is the scaled number of kept units: its mean over keys is the undropped one."""
    model = Dropped()
    with torch.no_grad():
        model.first.weight.fill_(0)
        model.first.bias.fill_(1)
        model.second.weight.fill_(1)
        model.second.bias.fill_(0)

    def total(m: nn.Module, batch: Any) -> torch.Tensor:
        return m(batch["x"]).mean()

    batch = {"x": torch.zeros(512, 8)}
    pipeline = plait.compile(total, model, batch, num_microbatches=4, codegen="eager")
    loss = float(pipeline.forward(batch))
    kept = loss * 0.75 / 64
    assert kept == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / (512 * 64)))


# JAX: state=, rng, has_aux, integer leaves.


def stateful(p: Any, batch: Any, state: Any) -> Any:
    h = plait.stage_boundary(batch["x"] * p["w"] + state["mean"])
    new_state = {
        "mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch["x"]),
        "count": state["count"] + 1,
    }
    return jnp.sum(h * h), new_state


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("engine", ENGINES)
def test_state_is_chained_by_microbatch(engine: str, schedule: str) -> None:
    run = Run("jax", engine, schedule)
    p = {"w": jnp.asarray([1.0, 2.0])}
    state = {"mean": jnp.asarray(0.5), "count": jnp.asarray(0, jnp.int32)}
    batch = {"x": jnp.arange(8.0).reshape(4, 2)}
    pipeline = run.compile(stateful, p, batch, num_microbatches=4, state=state)
    loss, grads = pipeline.loss_and_grads(batch)
    wanted_loss, wanted_grad, replayed = 0.0, jnp.zeros(2), state
    for index in range(4):
        part = {"x": batch["x"][index : index + 1]}
        (one, replayed), grad = jax.value_and_grad(stateful, has_aux=True)(p, part, replayed)
        wanted_loss, wanted_grad = wanted_loss + one / 4, wanted_grad + grad["w"] / 4
    np.testing.assert_allclose(plait.to_numpy(loss), wanted_loss, rtol=1e-6)
    np.testing.assert_allclose(plait.to_numpy(grads["w"]), wanted_grad, rtol=1e-5)
    left = numpy_tree(pipeline.state)
    assert left["count"] == 4
    np.testing.assert_allclose(left["mean"], replayed["mean"], rtol=1e-6)
    assert state["count"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_state_can_be_set(engine: str) -> None:
    p = {"w": jnp.asarray([1.0, 2.0])}
    state = {"mean": jnp.asarray(0.5), "count": jnp.asarray(0, jnp.int32)}
    batch = {"x": jnp.arange(8.0).reshape(4, 2)}
    run = Run("jax", engine, "1f1b")
    pipeline = run.compile(stateful, p, batch, num_microbatches=4, state=state)
    assert pipeline.state is None
    first, _ = numpy_tree(pipeline.loss_and_grads(batch))
    left = numpy_tree(pipeline.state)
    second, _ = numpy_tree(pipeline.loss_and_grads(batch))
    assert second != first
    pipeline.state = given = {name: np.array(x) for name, x in left.items()}
    given["mean"][...] = 7  # is the caller's, and not read again
    assert numpy_tree(pipeline.state) == left
    assert numpy_tree(pipeline.loss_and_grads(batch))[0] == second
    assert pipeline.state["count"] == 8
    pipeline.state = None
    assert numpy_tree(pipeline.loss_and_grads(batch))[0] == first
    for wrong, message in (
        ({"mean": left["mean"]}, r"state: the structure .*missing \['count'\]"),
        ({"mean": left["mean"], "count": 1.5}, r"'count': expected an array i32\[\]"),
        ({"mean": left["mean"], "count": np.zeros(2, np.int32)}, r"'count': compiled for i32\[\]"),
    ):
        with pytest.raises(plait.PlaitError, match=message):
            pipeline.state = wrong
    assert pipeline.state["count"] == 4  # as it was


def test_state_of_a_torch_model_is_the_models_own() -> None:
    pipeline = Run("torch", "local", "1f1b").compile(
        net_loss, Net(), net_batch(), split=["second", "head"], num_microbatches=3
    )
    with pytest.raises(plait.PlaitError, match="steps read the model's own: write to those"):
        pipeline.state = {}


def noisy(p: Any, batch: Any, *, rng: Any) -> Any:
    h = plait.stage_boundary(batch["x"] * p["w"])
    return jnp.sum(h * jax.random.normal(rng, h.shape)), {"noise": jax.random.normal(rng, (2,))}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_gets_the_microbatchs_key_and_returns_aux(engine: str) -> None:
    run = Run("jax", engine, "zb-h1")
    p, batch = {"w": jnp.ones(2)}, {"x": jnp.ones((4, 2))}
    pipeline = run.compile(noisy, p, batch, num_microbatches=4, seed=11, has_aux=True)
    (loss, aux), grads = pipeline.loss_and_grads(batch, step=5)
    step_key = jax.random.fold_in(jax.random.key(11), 5)
    keys = [jax.random.fold_in(step_key, m) for m in range(4)]
    values = [
        jax.value_and_grad(noisy, has_aux=True)(p, {"x": batch["x"][:1]}, rng=k) for k in keys
    ]
    np.testing.assert_allclose(plait.to_numpy(loss), np.mean([v[0][0] for v in values]), rtol=1e-5)
    wanted_aux = np.stack([v[0][1]["noise"] for v in values])
    np.testing.assert_allclose(plait.to_numpy(aux["noise"]), wanted_aux, rtol=1e-5)
    wanted = np.mean([v[1]["w"] for v in values], axis=0)
    np.testing.assert_allclose(plait.to_numpy(grads["w"]), wanted, rtol=1e-5)


def test_integer_leaves_come_back_as_float0() -> None:
    p = {"w": jnp.ones(2), "ids": jnp.arange(2)}

    def loss_fn(p: Any, batch: Any) -> Any:
        return jnp.sum(batch["x"][:, p["ids"]] * p["w"])

    pipeline = plait.compile(loss_fn, p, {"x": jnp.ones((2, 2))}, num_microbatches=2)
    _, grads = pipeline.loss_and_grads({"x": jnp.ones((2, 2))})
    wanted = jax.grad(loss_fn, allow_int=True)(p, {"x": jnp.ones((2, 2))})
    assert grads["ids"].dtype == wanted["ids"].dtype == jax.dtypes.float0
    assert grads["ids"].shape == (2,)
