"""Llama and DeepSeek-V3 in Flax over all axes of a mesh, in a pipeline: the step of the models on one device."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import plait
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.frontends.jax.reference import named_gradients, reference
from plait.frontends.reference import Reference
from plait.models.deepseek_v3 import config as deepseek_config
from plait.models.deepseek_v3 import flax as deepseek_v3
from plait.models.deepseek_v3 import parallel_flax as parallel_deepseek
from plait.models.llama import config as llama_config
from plait.models.llama import flax as llama
from plait.models.llama import parallel_flax as parallel_llama

SIZES: dict[str, Any] = {"num_layers": 2, "seq_len": 8, "dim": 32}
LLAMA = replace(llama_config.CONFIGS["tiny"], **SIZES, hidden_dim=48, tied_head=True)
DEEPSEEK_V3 = replace(deepseek_config.CONFIGS["tiny"], **SIZES)


def devices(**axes: int) -> Any:
    """The mesh that the user's model is mapped over."""
    found = jax.devices()[: int(np.prod(list(axes.values())))]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=found)


def check(loss_fn: Any, model: nnx.Module, batch: Any, wanted: Reference, **options: Any) -> Any:
    """AssertionError unless a step of two stages gives what the model gives; the pipeline."""
    cut = partial(loss_fn, cuts=(1,), boundary=plait.stage_boundary)
    pipeline = plait.compile(cut, model, batch, num_microbatches=2, **options)
    assert pipeline.program.num_stages == 2
    loss, grads = pipeline.loss_and_grads(batch)
    allowed = tolerance("f32", "framework")
    assert relative_error(plait.to_numpy(loss), wanted.loss) <= allowed.loss
    assert gradient_error(named_gradients(grads), wanted.grads) <= allowed.grads
    return pipeline


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_llama_with_tensor_sequence_and_context_parallelism(engine: str) -> None:
    """Keys and values go round a ring, and the two stages share the embedding."""
    form = parallel_llama.Form(devices(model=2, context=2), "model", "context", True)
    batch = next(llama_config.batches(LLAMA, "train", 4, seed=0))
    model = llama.build(LLAMA)
    wanted = reference(llama.loss_fn, model, batch, num_microbatches=2)
    loss = partial(parallel_llama.loss_fn, form=form)
    mesh = {"model": 2, "stage": 2, "context": 2}
    pipeline = check(loss, model, batch, wanted, engine=engine, mesh=mesh)
    assert "tok_embed.embedding" in pipeline.program.shared_params


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_deepseek_v3_with_experts_over_ranks(engine: str) -> None:
    """The routers' counts of tokens are alike on all ranks, and go from microbatch to microbatch."""
    batch = next(deepseek_config.batches(DEEPSEEK_V3, "train", 4, seed=0))
    model = deepseek_v3.build(DEEPSEEK_V3)
    wanted = reference(deepseek_v3.loss_fn, model, batch, num_microbatches=2)
    loss = partial(parallel_deepseek.loss_fn, mesh=devices(expert=2))
    mesh = {"stage": 2, "expert": 2}
    pipeline = check(loss, model, batch, wanted, engine=engine, mesh=mesh)
    flat = nnx.to_flat_state(pipeline.state)
    state = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}
    counts = {name: count for name, count in wanted.buffers.items() if name.endswith("counts")}
    assert counts
    for name, count in counts.items():
        assert count.any()
        np.testing.assert_array_equal(state[name], count, err_msg=name)
