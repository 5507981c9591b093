"""Public cases about what crosses between stages: R15, R20, R39, R81, and skip connections."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree, runs

import plait

SHORT = ("1f1b", "zb-h1")


def check_against_torch(
    run: Run,
    loss_fn: Any,
    params: dict[str, Any],
    batch: dict[str, Any],
    num_microbatches: int,
    **options: Any,
) -> plait.Pipeline:
    """Loss and gradients of a run against eager torch in f64, microbatch by microbatch."""
    model = run.model(params)
    arrays = {
        name: run.array(value, np.asarray(value).dtype) if isinstance(value, np.ndarray) else value
        for name, value in batch.items()
    }
    pipeline = run.compile(loss_fn, model, arrays, num_microbatches=num_microbatches, **options)
    loss, grads = numpy_tree(pipeline.loss_and_grads(arrays))
    reference = {
        n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in params.items()
    }
    total = 0.0
    for index in range(num_microbatches):
        part = {
            name: _rows(value, index, num_microbatches) if isinstance(value, np.ndarray) else value
            for name, value in batch.items()
        }
        one = loss_fn(reference, part) / num_microbatches
        one.backward()
        total += float(one.detach())
    assert math.isclose(loss, total, rel_tol=1e-5)
    for name, tensor in reference.items():
        wanted = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
        scale = max(1e-6, float(np.abs(wanted).max()))
        np.testing.assert_allclose(grads[name], wanted, rtol=1e-5, atol=1e-5 * scale)
    return pipeline


def _rows(value: Any, index: int, count: int) -> torch.Tensor:
    length = value.shape[0] // count
    part = torch.tensor(value[index * length : (index + 1) * length])
    return part.double() if part.is_floating_point() else part


def edges(pipeline: plait.Pipeline, kind: str) -> set[tuple[int, int]]:
    return {(e.source, e.target) for e in pipeline.program.edges if e.kind == kind}


# R15: a float without a gradient crosses.


def with_table(first: bool) -> Any:
    def loss_fn(p: Any, batch: Any) -> Any:
        position = batch["position"] * 0.5
        table = position.cos() if isinstance(position, torch.Tensor) else jnp.cos(position)
        h = batch["x"] * p["w0"]
        for stage in range(1, 4):
            pair = (table, h) if first else (h, table)
            pair = plait.stage_boundary(pair)
            table, h = pair if first else pair[::-1]
            h = h * p[f"w{stage}"] if stage == 3 else h * p[f"w{stage}"] * table
        return (h * h).sum()

    return loss_fn


@pytest.mark.parametrize("first", [False, True])
@runs(schedules=SHORT)
def test_r15_only_the_hidden_state_has_a_gradient_message(run: Run, first: bool) -> None:
    rng = np.random.default_rng(0)
    params = {f"w{s}": rng.normal(size=(3,)).astype(np.float32) for s in range(4)}
    batch = {
        "x": rng.normal(size=(4, 3)).astype(np.float32),
        "position": np.arange(12, dtype=np.float32).reshape(4, 3),
    }
    pipeline = check_against_torch(run, with_table(first), params, batch, 4)
    assert edges(pipeline, "gradient") == {(1, 0), (2, 1), (3, 2)}
    gradients = [e for e in pipeline.program.edges if e.kind == "gradient"]
    assert len(gradients) == 3


# R20: activations and gradients in odd layouts.


def _transposed(h: Any) -> Any:
    return h.reshape(2, 3).T


def _every_second_column(h: Any) -> Any:
    return h.reshape(1, 6)[:, ::2]


def _row_repeated(h: Any) -> Any:
    row = h.reshape(6)[:3].reshape(1, 3)
    return row.expand(4, 3) if isinstance(row, torch.Tensor) else jnp.broadcast_to(row, (4, 3))


def _channels_last(h: Any) -> Any:
    image = h.reshape(1, 1, 2, 3)
    return image.permute(0, 2, 3, 1) if hasattr(image, "permute") else image.transpose(0, 2, 3, 1)


def _zero_dim(h: Any) -> Any:
    return h.reshape(6).sum()


def _diagonal(h: Any) -> Any:
    return h.reshape(2, 3)[:, :2].diagonal()


LAYOUTS = [_transposed, _every_second_column, _row_repeated, _channels_last, _zero_dim, _diagonal]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@runs(schedules=("1f1b",))
def test_r20_layouts(run: Run, layout: Any) -> None:
    def loss_fn(p: Any, batch: Any) -> Any:
        h = plait.stage_boundary(layout(batch["x"] * p["one"]))
        # Different weights for each entry, so that a layout taken for another gives another number.
        weights = batch["weights"].reshape(-1)[: math.prod(h.shape)].reshape(h.shape)
        return (h * weights * p["two"]).sum()

    x = np.array([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]], np.float32)
    batch = {
        "x": np.concatenate([x[None], x[None] + 100]),
        "weights": np.arange(1.0, 25.0, dtype=np.float32).reshape(2, 12),
    }
    check_against_torch(run, loss_fn, {"one": np.float32(1), "two": np.float32(1)}, batch, 2)


def plain_sum(p: Any, batch: Any) -> Any:
    return plait.stage_boundary(batch["x"] * p["w"]).sum()


@runs(schedules=SHORT)
def test_r20_a_gradient_that_is_an_expanded_scalar(run: Run) -> None:
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    check_against_torch(run, plain_sum, {"w": np.ones(3, np.float32)}, {"x": x}, 2)


# R39: keywords and masks of each microbatch, in any stage.


def masked(stages: tuple[int, ...], keyword: str) -> Any:
    def loss_fn(p: Any, batch: Any) -> Any:
        h = batch["x"]
        for stage in range(4):
            h = h * p[f"w{stage}"]
            if stage in stages:
                h = h * batch[keyword]
            if stage < 3:
                h = plait.stage_boundary(h)
        return h.sum()

    return loss_fn


@pytest.mark.parametrize("stages", [(0, 1, 2, 3), (2,)])
@runs(schedules=SHORT)
def test_r39_each_stage_sees_the_mask_of_its_microbatch(run: Run, stages: tuple[int, ...]) -> None:
    params = {f"w{s}": np.float32(1 + s) for s in range(4)}
    batch = {
        "x": np.ones((4, 1), np.float32),
        "mask": np.array([[1.0], [2.0], [3.0], [4.0]], np.float32),
    }
    pipeline = check_against_torch(run, masked(stages, "mask"), params, batch, 4)
    for stage in pipeline.program.stages:
        assert ("mask" in "".join(stage.batch)) == (stage.index in stages)


@runs(schedules=("1f1b",))
def test_r39_a_python_number(run: Run) -> None:
    params = {f"w{s}": np.float32(1 + s) for s in range(4)}
    batch = {"x": np.ones((4, 1), np.float32), "scale": 0.5}
    check_against_torch(run, masked((0, 2), "scale"), params, batch, 4)


# R81: residuals that are scalars, integers, booleans, empty.


def odd_residuals(p: Any, batch: Any) -> Any:
    h = plait.stage_boundary(batch["x"] * p["w0"])
    s = (p["w1"] * p["w1"]).sum()
    count = (h > 0).sum()
    positive = h.sum() > -1e9
    empty = h[:0]
    h = s * h * h.mean() * (count * 1.0) * (positive * 1.0) + (empty * empty).sum()
    h = plait.stage_boundary(h)
    return (h * p["w2"]).sum()


@runs(schedules=SHORT)
def test_r81_odd_residuals(run: Run) -> None:
    rng = np.random.default_rng(3)
    params = {f"w{s}": rng.normal(size=(3,)).astype(np.float32) for s in range(3)}
    check_against_torch(
        run, odd_residuals, params, {"x": rng.normal(size=(3, 3)).astype(np.float32)}, 3
    )


# Skip connections over two stages.


def skipping(p: Any, batch: Any) -> Any:
    early = batch["x"] @ p["w0"]
    h = plait.stage_boundary(early)
    h = plait.stage_boundary(h @ p["w1"])
    return ((h + early) @ p["w2"] * early).sum()


@runs()
def test_a_skip_over_two_stages(run: Run) -> None:
    rng = np.random.default_rng(4)
    params = {f"w{s}": rng.normal(size=(3, 3)).astype(np.float32) for s in range(3)}
    pipeline = check_against_torch(
        run, skipping, params, {"x": rng.normal(size=(6, 3)).astype(np.float32)}, 3
    )
    assert (0, 2) in edges(pipeline, "activation")
    assert (2, 0) in edges(pipeline, "gradient")
