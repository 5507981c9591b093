"""Models over a mesh of devices give the loss and the gradients of the same models on one."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.models.deepseek_v3 import config as deepseek_config
from plait.models.deepseek_v3 import flax as deepseek_v3
from plait.models.deepseek_v3 import parallel_flax as parallel_deepseek
from plait.models.llama import config as llama_config
from plait.models.llama import flax as llama
from plait.models.llama import parallel_flax as parallel_llama
from plait.models.llama.parallel_flax import Form

LLAMA = replace(llama_config.CONFIGS["tiny"], num_layers=1, seq_len=8, dim=32)
SMALL = {"num_layers": 1, "num_dense_layers": 0, "seq_len": 8, "dim": 32}
DEEPSEEK_V3 = replace(deepseek_config.CONFIGS["tiny"], **SMALL)


def mesh(**axes: int) -> Any:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


FORMS = {
    "tensor": partial(Form, model_axis="model"),
    "sequence": partial(Form, model_axis="model", sequence_parallel=True),
    "context": partial(Form, context_axis="context"),
    "all, tied head": partial(
        Form, model_axis="model", context_axis="context", sequence_parallel=True
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_llama(name: str) -> None:
    config = replace(LLAMA, tied_head="tied" in name)
    batch = next(llama_config.batches(config, "train", 2, seed=0))
    spread = partial(parallel_llama.loss_fn, form=FORMS[name](mesh(model=2, context=2)))
    assert_same(llama.build(config), batch, llama.loss_fn, spread)


def test_llama_has_whole_heads_on_each_rank() -> None:
    batch = next(llama_config.batches(LLAMA, "train", 2, seed=0))
    with pytest.raises(ValueError, match="2 key-value heads do not divide over 4 ranks"):
        parallel_llama.loss_fn(llama.build(LLAMA), batch, form=Form(mesh(model=4), "model"))


def test_deepseek_v3() -> None:
    batch = next(deepseek_config.batches(DEEPSEEK_V3, "train", 4, seed=0))
    spread = partial(parallel_deepseek.loss_fn, mesh=mesh(expert=2))
    assert_same(deepseek_v3.build(DEEPSEEK_V3), batch, deepseek_v3.loss_fn, spread)


def assert_same(model: nnx.Module, batch: Any, plain: Any, spread: Any) -> None:
    """Loss, gradients and buffers of one step."""
    graphdef, params, buffers = nnx.split(model, nnx.Param, ...)

    def step(loss_fn: Any) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            merged = nnx.merge(graphdef, params, buffers, copy=True)
            return loss_fn(merged, batch), nnx.split(merged, nnx.Param, ...)[2]

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)

    ((loss, after), grads), ((found, found_after), found_grads) = step(plain), step(spread)
    allowed = tolerance("f32", "framework")
    assert relative_error(np.asarray(found), np.asarray(loss)) <= allowed.loss
    assert gradient_error(arrays(found_grads), arrays(grads)) <= allowed.grads
    jax.tree.map(np.testing.assert_array_equal, found_after, after)


def arrays(state: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
