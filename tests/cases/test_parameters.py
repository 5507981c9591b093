"""Public cases about parameters: used twice, shared over stages, frozen, with hooks."""

from typing import Any

import numpy as np
import pytest
import torch
from case_runs import SCHEDULES, Run, numpy_tree, runs
from torch import nn

import plait

MATRIX = [[1.0, 2.0], [3.0, 4.0]]


# R01: a weight used at two depths of one stage.


def used_twice(p: Any, batch: Any) -> Any:
    x = plait.stage_boundary(batch["x"] * p["one"])
    x = plait.stage_boundary(x @ p["w"] @ p["w"])
    return x.sum()


def used_three_times(p: Any, batch: Any) -> Any:
    x = plait.stage_boundary(batch["x"] * p["one"])
    x = plait.stage_boundary(x @ p["w"] @ p["w"] @ p["w"])
    return x.sum()


def used_with_a_residual_add(p: Any, batch: Any) -> Any:
    x = plait.stage_boundary(batch["x"] * p["one"])
    h = x @ p["w"]
    x = plait.stage_boundary(h + h @ p["w"])
    return x.sum()


@runs()
def test_r01_one_microbatch(run: Run) -> None:
    model = run.model({"w": MATRIX, "one": 1.0})
    batch = {"x": run.array([[1.0, -1.0]])}
    pipeline = run.compile(used_twice, model, batch, num_microbatches=1, reduction="sum")
    loss, grads = numpy_tree(pipeline.loss_and_grads(batch))
    assert loss == -20
    np.testing.assert_array_equal(grads["w"], [[1, 5], [-5, -9]])
    assert grads["one"] == 17 - 37  # dX = [17, 37], times x


@runs()
def test_r01_three_microbatches(run: Run) -> None:
    model = run.model({"w": MATRIX, "one": 1.0})
    x = np.array([[1.0, -1.0]])
    batch = {"x": run.array(np.concatenate([x, 2 * x, -x]))}
    pipeline = run.compile(used_twice, model, batch, num_microbatches=3, reduction="sum")
    loss, grads = numpy_tree(pipeline.loss_and_grads(batch))
    assert loss == -40
    np.testing.assert_array_equal(grads["w"], [[2, 10], [-10, -18]])


@pytest.mark.parametrize("loss_fn", [used_three_times, used_with_a_residual_add])
@runs(schedules=("1f1b", "zb-h1"))
def test_r01_variants(run: Run, loss_fn: Any) -> None:
    model = run.model({"w": MATRIX, "one": 1.0})
    batch = {"x": run.array([[1.0, -1.0], [2.0, 1.0]])}
    pipeline = run.compile(loss_fn, model, batch, num_microbatches=2, reduction="sum")
    _, grads = numpy_tree(pipeline.loss_and_grads(batch))
    w = torch.tensor(MATRIX, dtype=torch.float64, requires_grad=True)
    p = {"w": w, "one": torch.ones((), dtype=torch.float64)}
    loss_fn(p, {"x": torch.tensor([[1.0, -1.0], [2.0, 1.0]], dtype=torch.float64)}).backward()
    np.testing.assert_allclose(grads["w"], w.grad, rtol=1e-6)


# R04: hooks on parameters.


class FourLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def square_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().mean()


SPLIT = ["layers.1", "layers.2", "layers.3"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_r04_post_accumulate_hooks_fire_once_with_the_sum(schedule: str) -> None:
    model, batch = FourLinear(), {"x": torch.randn(8, 3)}
    pipeline = plait.compile(
        square_loss,
        model,
        batch,
        split=SPLIT,
        schedule=schedule,
        num_microbatches=4,
        codegen="eager",
    )
    seen: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p.grad.clone()))
        )
    pipeline.step(batch)
    reference = FourLinear()
    square_loss(reference, batch).backward()
    assert sorted(name for name, _ in seen) == sorted(n for n, _ in model.named_parameters())
    wanted = dict(reference.named_parameters())
    for name, grad in seen:
        torch.testing.assert_close(grad, wanted[name].grad, rtol=1e-5, atol=1e-6)


def test_r04_an_optimizer_in_the_hook() -> None:
    model, batch = FourLinear(), {"x": torch.randn(8, 3)}
    pipeline = plait.compile(
        square_loss,
        model,
        batch,
        split=SPLIT,
        schedule="zb-h1",
        num_microbatches=4,
        codegen="eager",
    )

    def sgd(p: torch.Tensor) -> None:
        with torch.no_grad():
            p -= 0.1 * p.grad
        p.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(sgd)
    pipeline.step(batch)
    reference = FourLinear()
    square_loss(reference, batch).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.1 * q.grad, rtol=1e-5, atol=1e-6)
        assert p.grad is None


def test_r04_a_tensor_hook_is_refused() -> None:
    model, batch = FourLinear(), {"x": torch.randn(8, 3)}
    model.layers[2].weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(plait.PlaitError, match=r"layers\.2\.weight.*hook"):
        plait.compile(square_loss, model, batch, split=SPLIT, num_microbatches=4, codegen="eager")


# R63: an embedding tied to the head, over ranks.

TABLE = [[1.0, 2.0], [3.0, 4.0]]


def tied(p: Any, batch: Any) -> Any:
    h = plait.stage_boundary(p["E"][batch["tokens"]])
    h = plait.stage_boundary(h * 1.0)
    return (h @ p["E"].T).sum()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@runs()
def test_r63_tied_embedding(run: Run, num_microbatches: int) -> None:
    model = run.model({"E": TABLE})
    batch = {"tokens": run.array([0, 1], np.int32 if run.source == "jax" else np.int64)}
    pipeline = run.compile(tied, model, batch, num_microbatches=num_microbatches, reduction="sum")
    assert pipeline.program.shared_params == {"E": (0, 2)}
    loss, grads = numpy_tree(pipeline.loss_and_grads(batch))
    assert loss == 52
    np.testing.assert_array_equal(grads["E"], [[8, 12], [8, 12]])


def test_r63_the_norm_counts_a_shared_parameter_once() -> None:
    model = nn.ParameterDict({"E": nn.Parameter(torch.tensor(TABLE))})
    batch = {"tokens": torch.tensor([0, 1])}
    pipeline = plait.compile(
        tied, model, batch, num_microbatches=2, reduction="sum", codegen="eager"
    )
    pipeline.step(batch)
    norm = pipeline.clip_grad_norm_(1.0)
    torch.testing.assert_close(norm, torch.tensor([[8.0, 12.0], [8.0, 12.0]]).norm())
    torch.testing.assert_close(model["E"].grad.norm(), torch.tensor(1.0))


# R66: frozen parameters.


def four_products(p: Any, batch: Any) -> Any:
    h = batch["x"]
    for stage in range(4):
        h = h @ p[f"w{stage}"] + p[f"b{stage}"]
        if f"down{stage}" in p:
            h = h + (h @ p[f"down{stage}"]) @ p[f"up{stage}"]
        if stage < 3:
            h = plait.stage_boundary(h)
    return (h * h).sum()


FREEZE: dict[str, tuple[str, ...]] = {
    "first_stage": ("w0", "b0"),
    "two_stages_and_an_adapter": ("w0", "b0", "w1", "b1", "w2", "b2"),
    "last_stage": ("w3", "b3"),
    "all_but_biases": ("w0", "w1", "w2", "w3"),
    "all_but_the_first": ("w1", "b1", "w2", "b2", "w3", "b3"),
}


def small_params(adapter: bool) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    params: dict[str, Any] = {}
    for stage in range(4):
        params[f"w{stage}"] = rng.normal(size=(3, 3)) / 2
        params[f"b{stage}"] = rng.normal(size=(3,)) / 2
    if adapter:
        params["down2"] = rng.normal(size=(3, 1))
        params["up2"] = rng.normal(size=(1, 3))
    return params


@pytest.mark.parametrize("kind", FREEZE)
@runs(schedules=("1f1b", "zb-h1"))
def test_r66_frozen_parameters(run: Run, kind: str) -> None:
    frozen = FREEZE[kind]
    params = small_params(adapter=kind == "two_stages_and_an_adapter")
    model = run.model(params)
    options: dict[str, Any] = {}
    if run.source == "torch":
        for name in frozen:
            model[name].requires_grad_(False)
    else:
        options["trainable"] = lambda path, leaf: not any(n in str(path) for n in frozen)
    x = np.random.default_rng(2).normal(size=(4, 3))
    batch = {"x": run.array(x)}
    pipeline = run.compile(four_products, model, batch, num_microbatches=4, **options)
    _, grads = pipeline.loss_and_grads(batch)

    reference = {
        n: torch.tensor(v, dtype=torch.float64, requires_grad=n not in frozen)
        for n, v in params.items()
    }
    (four_products(reference, {"x": torch.tensor(x)}) / 4).backward()
    for name, tensor in reference.items():
        if name in frozen:
            assert grads[name] is None
        else:
            scale = float(tensor.grad.abs().max())
            np.testing.assert_allclose(
                plait.to_numpy(grads[name]), tensor.grad, rtol=1e-4, atol=1e-5 * scale
            )
    gradient_edges = {(e.source, e.target) for e in pipeline.program.edges if e.kind == "gradient"}
    lowest = min(s for s in range(4) if {f"w{s}", f"b{s}"} - set(frozen) or f"up{s}" in params)
    assert gradient_edges == {(s + 1, s) for s in range(lowest, 3)}


def test_r66_a_flag_changed_between_steps_is_an_error() -> None:
    model, batch = FourLinear(), {"x": torch.randn(8, 3)}
    pipeline = plait.compile(
        square_loss, model, batch, split=SPLIT, num_microbatches=4, codegen="eager"
    )
    pipeline.step(batch)
    model.layers[1].weight.requires_grad_(False)
    with pytest.raises(plait.PlaitError, match=r"layers\.1\.weight.*is frozen now.*compile again"):
        pipeline.step(batch)
