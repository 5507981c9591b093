"""DeepSeek-V3 from both frontends on both backends: loss, gradients and the routers' counts of the unpipelined step."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree
from flax import nnx

import plait
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.frontends.jax import reference as jax_reference
from plait.frontends.reference import Reference
from plait.frontends.torch import reference as torch_reference
from plait.models.deepseek_v3 import flax as deepseek_flax
from plait.models.deepseek_v3 import torch as deepseek_torch
from plait.models.deepseek_v3.config import CONFIGS, Config, batches
from plait.models.deepseek_v3.moe.flax import end_step as end_flax_step
from plait.models.deepseek_v3.moe.torch import end_step as end_torch_step

NUM_MICROBATCHES = 4
NUM_STAGES = {"1f1b": 2, "zbv": 4}
CONFIG = replace(CONFIGS["tiny"], v_head_dim=12, seq_len=12)
PER_STAGE = {name: replace(CONFIG, num_layers=n) for name, n in NUM_STAGES.items()}
RUNS = [
    Run(source, engine, schedule)
    for source in ("torch", "jax")
    for engine in ("local", "mpmd")
    for schedule in NUM_STAGES
]


def compiled(run: Run, config: Config) -> tuple[plait.Pipeline, Any, Any, Reference]:
    """A pipeline, its model, a batch, and what the step gives without a pipeline."""
    cuts = config.cuts(NUM_STAGES[run.schedule])
    batch = next(batches(config, "train", 2 * NUM_MICROBATCHES, seed=0))
    options: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES}
    if run.source == "torch":
        model, loss_fn = deepseek_torch.build(config), deepseek_torch.loss_fn
        options["split"] = [f"layers.{cut}" for cut in cuts]
        wanted = torch_reference.reference(loss_fn, model, batch, num_microbatches=NUM_MICROBATCHES)
        return run.compile(loss_fn, model, batch, **options), model, batch, wanted
    model = deepseek_flax.build(config)
    loss = partial(deepseek_flax.loss_fn, cuts=cuts, boundary=plait.stage_boundary)
    wanted = jax_reference.reference(loss, model, batch, num_microbatches=NUM_MICROBATCHES)
    return run.compile(loss, model, batch, **options), model, batch, wanted


def state_by_name(run: Run, pipeline: plait.Pipeline) -> dict[str, Any]:
    if run.source == "torch":
        return numpy_tree(pipeline.state)  # type: ignore[no-any-return]
    flat = nnx.to_flat_state(pipeline.state)
    return {".".join(map(str, path)): plait.to_numpy(leaf[...]) for path, leaf in flat}


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.source}-{r.engine}-{r.schedule}")
def test_a_step_is_that_of_the_framework(run: Run) -> None:
    config = PER_STAGE[run.schedule]
    pipeline, _, batch, wanted = compiled(run, config)
    assert len(pipeline.program.stages) == NUM_STAGES[run.schedule]
    loss, grads = pipeline.loss_and_grads(batch)
    side = torch_reference if run.source == "torch" else jax_reference
    own = (run.source, run.backend) in (("torch", "torch"), ("jax", "jax"))
    limit = tolerance("f32", "framework" if own else "backends")
    assert relative_error(plait.to_numpy(loss), wanted.loss) <= limit.loss
    assert gradient_error(side.named_gradients(grads), wanted.grads) <= limit.grads
    state = state_by_name(run, pipeline)
    counts = {n: c for n, c in wanted.buffers.items() if n.endswith("counts")}
    assert len(counts) == config.num_layers - config.num_dense_layers
    for name, expected in counts.items():
        assert expected.sum() == 2 * NUM_MICROBATCHES * config.seq_len * config.top_k
        np.testing.assert_array_equal(state[name], expected, err_msg=name)


def test_end_step_follows_a_step_of_the_pipeline() -> None:
    """The bias that a step's counts give takes part in the next step."""
    pipeline, model, batch, wanted = compiled(Run("torch", "local", "1f1b"), PER_STAGE["1f1b"])
    pipeline.step(batch)
    (router,) = (layer.moe.router for layer in model.layers if not layer.is_dense)
    np.testing.assert_array_equal(router.counts, wanted.buffers["layers.1.moe.router.counts"])
    before = router.counts.clone()
    end_torch_step(model, speed=0.25)
    mean = before.float().mean()
    assert torch.equal(router.bias, 0.25 * torch.sign(mean - before))
    assert not router.counts.any()
    pipeline.step(batch)
    after = torch_reference.reference(
        deepseek_torch.loss_fn, model, batch, num_microbatches=NUM_MICROBATCHES
    )
    assert not torch.equal(router.counts, before)
    twice = after.buffers["layers.1.moe.router.counts"]
    np.testing.assert_array_equal(2 * router.counts.numpy(), twice)


def test_end_step_of_a_flax_model_whose_pipeline_left_its_state() -> None:
    """The bias that a step's counts give is handed back, and takes part in the next step."""
    pipeline, model, batch, wanted = compiled(Run("jax", "mpmd", "1f1b"), PER_STAGE["1f1b"])
    pipeline.loss_and_grads(batch)
    nnx.update(model, pipeline.state)
    router = model.layers[1].moe.router
    counts = wanted.buffers["layers.1.moe.router.counts"]
    np.testing.assert_array_equal(router.counts[...], counts)
    end_flax_step(model, speed=0.25)
    bias = np.asarray(router.bias[...])
    np.testing.assert_array_equal(bias, 0.25 * np.sign(counts.mean() - counts))
    pipeline.state = model
    pipeline.loss_and_grads(batch)
    after = jax_reference.reference(
        deepseek_flax.loss_fn, model, batch, num_microbatches=NUM_MICROBATCHES
    )
    again = after.buffers["layers.1.moe.router.counts"]
    assert not np.array_equal(again, counts)
    nnx.update(model, pipeline.state)
    np.testing.assert_array_equal(router.counts[...], again)
    np.testing.assert_array_equal(router.bias[...], bias)
