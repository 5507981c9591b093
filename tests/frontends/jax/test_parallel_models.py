"""Models over a mesh, captured with cuts between their layers: each rank's step is that of the model on one device."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from mesh_checks import check, jax_mesh, rank_inputs, run

from plait.frontends.captured import Captured
from plait.frontends.jax.boundary import stage_boundary
from plait.models.deepseek_v3 import config as deepseek_config
from plait.models.deepseek_v3 import flax as deepseek_v3
from plait.models.deepseek_v3 import parallel_flax as parallel_deepseek
from plait.models.llama import config as llama_config
from plait.models.llama import flax as llama
from plait.models.llama import parallel_flax as parallel_llama
from plait.models.llama.parallel_flax import Form

SIZES: Mapping[str, int] = {"num_layers": 2, "seq_len": 8, "dim": 32}
LLAMA = replace(llama_config.CONFIGS["tiny"], **SIZES, hidden_dim=48)
DEEPSEEK_V3 = replace(deepseek_config.CONFIGS["tiny"], **SIZES)
FORMS = {
    "tensor": ({"model": 2}, partial(Form, model_axis="model")),
    "sequence": ({"model": 2}, partial(Form, model_axis="model", sequence_parallel=True)),
    "context": ({"context": 2}, partial(Form, context_axis="context")),
    "all": (
        {"model": 2, "context": 2},
        partial(Form, model_axis="model", context_axis="context", sequence_parallel=True),
    ),
}


def plain(loss_fn: Any, model: nnx.Module, batch: Any) -> Any:
    """Loss, gradients and buffers of the model on one device."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any) -> Any:
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return loss_fn(merged, batch), nnx.split(merged, nnx.Param, ...)[2]

    (value, after), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return (value, grads), after


def captured_step(loss_fn: Any, model: Any, batch: Any, axes: Any, plain_loss: Any) -> Captured:
    loss = partial(loss_fn, cuts=(1,), boundary=stage_boundary)
    expected, after = plain(plain_loss, model, batch)
    captured = check(loss, model, batch, axes, loss_and_grads=expected)
    assert captured.num_cuts == 1
    changed = {k: np.asarray(v) for k, v in captured_buffers(after).items()}
    for out in run(captured.graph, rank_inputs(captured, batch, axes), axes):
        found = {name: x for (role, name), x in out.items() if role == "buffer_update"}
        assert {name for name, x in changed.items() if x.any()} <= {*found}
        for name, x in found.items():
            np.testing.assert_array_equal(x, changed[name])
    return captured


def captured_buffers(state: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf
        for path, leaf in leaves
    }


@pytest.mark.parametrize("name", FORMS)
def test_llama(name: str) -> None:
    axes, form = FORMS[name]
    config = replace(LLAMA, tied_head=name == "all")
    batch = next(llama_config.batches(config, "train", 2, seed=0))
    loss = partial(parallel_llama.loss_fn, form=form(jax_mesh(**axes)))
    captured = captured_step(loss, llama.build(config), batch, axes, llama.loss_fn)
    cut = {n.removesuffix(".kernel").rpartition(".")[2] for n in captured.layouts}
    linear = {*parallel_llama.COLUMNS, *parallel_llama.ROWS}
    table = {"tok_embed.embedding".rpartition(".")[2]}
    if "model" not in axes:
        assert cut == set()
    elif config.tied_head:
        assert cut == linear - {"head"} | table
    else:
        assert cut == linear | table


def test_deepseek_v3() -> None:
    axes = {"expert": 2}
    batch = next(deepseek_config.batches(DEEPSEEK_V3, "train", 4, seed=0))
    loss = partial(parallel_deepseek.loss_fn, mesh=jax_mesh(**axes))
    model = deepseek_v3.build(DEEPSEEK_V3)
    captured = captured_step(loss, model, batch, axes, deepseek_v3.loss_fn)
    assert captured.layouts == {
        f"layers.1.moe.experts.{name}": (("expert",),) for name in ("w1", "w2", "w3")
    }
