"""Mistakes with models over a mesh, from both frontends: each is one error, at compile time, that says what to do."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_module

import plait
from plait.backends.torch.mesh_groups import name_axis_group, release_axis
from plait.core_ir.ops.collective import group_name
from plait.models.deepseek_v3 import flax, parallel_flax, parallel_torch
from plait.models.deepseek_v3 import torch as plain_torch
from plait.models.deepseek_v3.config import CONFIGS, batches
from plait.models.deepseek_v3.moe.torch import Experts
from plait.models.llama import config as llama_config
from plait.models.llama import parallel_torch as parallel_llama
from plait.models.llama import torch as plain_llama

MESH = {"stage": 2, "expert": 2}
CONFIG = replace(CONFIGS["tiny"], num_layers=2, seq_len=8, dim=32)
X, W = np.ones((16, 4), np.float32), np.ones((4, 4), np.float32)
IN_TORCH = {"split": ["layers.1"], "codegen": "eager", "engine": "local"}
LINE = r"test_parallel_mistakes\.py:\d+: "


@pytest.fixture(scope="module", name="devices")
def _devices() -> Iterator[DeviceMesh]:
    """Eight ranks that exist in name only, of which this is the first."""
    dist.init_process_group("fake", rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("stage", "expert"))
    dist.destroy_process_group()


def refused(message: str, loss_fn: Any, model: Any, batch: Any, mesh: Any, **options: Any) -> None:
    with pytest.raises(plait.PlaitError) as raised:
        plait.compile(loss_fn, model, batch, num_microbatches=2, mesh=mesh, **options)
    assert re.search(message, str(raised.value), re.DOTALL), raised.value


def in_torch(message: str, function: Any, mesh: Any) -> None:
    """Of a function of what a linear layer gives."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"split": ["1"], "codegen": "eager", "engine": "local"}
    refused(message, lambda m, x: function(m(x)).sum(), model, torch.tensor(X), mesh, **options)


def in_jax(message: str, function: Any, axis: str = "expert", mesh: Any = None) -> None:
    """Of a function of the rows that a rank has, and the weights."""

    def loss_fn(w: Any, x: Any) -> Any:
        axes = AbstractMesh((2,), (axis,))
        mapped = jax.shard_map(
            function, mesh=axes, in_specs=(P(), P(axis)), out_specs=P(axis), check_vma=False
        )
        return jnp.sum(mapped(w, plait.stage_boundary(x @ w)))

    refused(message, loss_fn, jnp.asarray(W), X, mesh or MESH)


def test_an_axis_that_the_mesh_lacks(devices: DeviceMesh) -> None:
    lacks = r"over axis 'tensor', which the mesh does not have"
    in_jax(LINE + f".*{lacks}", lambda w, x: lax.psum(x @ w, "tensor"), "tensor")
    name: Any = group_name("tensor")
    name_axis_group("tensor", devices.get_group("expert"))
    message = r"'plait:tensor' of 4 ranks, but the mesh .* has no axis 'tensor' of that many; pass"
    in_torch(LINE + f".*{message}", lambda y: all_reduce(y, "sum", name), dict(MESH, expert=4))
    release_axis("tensor")


def test_a_group_that_is_along_no_axis(devices: DeviceMesh) -> None:
    odd = dist.new_group([0, 3, 5])
    message = (
        LINE + r".*ranks \[0, 3, 5\], which do not stand along an axis of the mesh.*a group can"
    )
    in_torch(message, lambda y: all_reduce(y, "sum", odd), {"stage": 2, "expert": 4})


@pytest.mark.parametrize("source", ["torch", "flax"])
def test_experts_that_do_not_divide_over_their_axis(source: str, devices: DeviceMesh) -> None:
    config = replace(CONFIG, num_experts=6, num_groups=1, top_groups=1)
    batch = next(batches(config, "train", 16, seed=0))
    mesh = {"stage": 2, "expert": 4}
    if source == "flax":
        model = flax.build(config)
        loss = partial(parallel_flax.loss_fn, mesh=AbstractMesh((4,), ("expert",)))
        marked = partial(loss, cuts=(1,), boundary=plait.stage_boundary)
        message = r"\.py:\d+: .*6 experts do not divide over 4 ranks; choose a number of ranks"
        refused(message, marked, model, batch, mesh)
        return
    with pytest.raises(ValueError, match="6 experts do not divide over 4 ranks; choose a number"):
        parallel_torch.expert_parallel(plain_torch.build(config), devices["expert"])
    cut = plain_torch.build(config).eval()  # by hand
    for module in cut.modules():
        if isinstance(module, Experts):
            distribute_module(module, devices["expert"], parallel_torch._cut)
    message = (
        r"'layers\.1\.moe\.experts\.w1'.*cut over expert.*does not divide: 6 by 4; choose a size"
    )
    refused(message, *over_experts(batch, cut, devices), mesh, **IN_TORCH)


def over_experts(batch: Any, model: nn.Module, devices: DeviceMesh) -> tuple[Any, nn.Module, Any]:
    loss = partial(parallel_torch.loss_fn, mesh=devices["expert"])
    return loss, model, {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}


@pytest.mark.parametrize("source", ["torch", "flax"])
def test_rows_that_do_not_divide_over_the_axis_of_the_experts(
    source: str, devices: DeviceMesh
) -> None:
    batch = next(batches(CONFIG, "train", 12, seed=0))
    mesh = {"stage": 2, "expert": 4}
    if source == "flax":
        loss = partial(parallel_flax.loss_fn, mesh=AbstractMesh((4,), ("expert",)))
        message = (
            r"parallel_flax\.py:\d+: shard_map of on_rank cuts dim 0 of its argument batch\.targets, of shape \[6, 8\],"
            r" over axis 'expert' of 4 ranks, .*; of the batch it has the rows of one microbatch"
        )
        refused(message, loss, flax.build(CONFIG), batch, mesh)
        return
    cut = parallel_torch.expert_parallel(plain_torch.build(CONFIG).eval(), devices["expert"])
    message = "6 rows do not divide over 4 ranks; choose a number of ranks that divides 6"
    refused(message, *over_experts(batch, cut, devices), mesh, **IN_TORCH)


def test_positions_that_do_not_divide_over_the_axis_of_the_context(devices: DeviceMesh) -> None:
    config = replace(llama_config.CONFIGS["tiny"], num_layers=1, seq_len=6)
    batch = next(llama_config.batches(config, "train", 2, seed=0))
    tensors = {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}
    form = parallel_llama.Form(devices, context_axis="expert")
    with pytest.raises(ValueError, match="6 positions do not divide over 4 ranks; choose"):
        parallel_llama.loss_fn(plain_llama.build(config), tensors, form=form)


def test_ranks_that_run_different_programs(devices: DeviceMesh) -> None:
    def function(y: Tensor) -> Tensor:
        return y.sin() if devices.get_local_rank("expert") == 0 else y

    message = LINE + "ranks would run different programs: .*sin"
    in_torch(message, function, {"stage": 2, "expert": 4})


def test_exchanges_whose_sizes_depend_on_the_data(devices: DeviceMesh) -> None:
    def counted(y: Tensor) -> Tensor:
        sizes = [int(n) for n in (y > 0).sum(1)[:4]]
        return all_to_all_single_autograd(y, sizes, sizes, devices.get_group("expert"))

    in_torch(LINE + "the value of a tensor.*pad the parts", counted, {"stage": 2, "expert": 4})

    def chosen(w: Any, x: Any) -> Any:
        return lax.all_to_all(x[x[:, 0] > 0], "expert", 0, 0, tiled=True) @ w

    in_jax(LINE + "a traced value decides .*a fixed size", chosen)

    def ragged(w: Any, x: Any) -> Any:
        sent = jnp.sum(x[:, 0] > 0).astype(jnp.int32)
        sizes, starts = jnp.stack([sent, sent]), jnp.array([0, 2], jnp.int32)
        got = lax.ragged_all_to_all(
            x, jnp.zeros_like(x), starts, sizes, starts, sizes, axis_name="expert"
        )
        return got @ w

    message = (
        "ragged_all_to_all, an exchange whose sizes depend on the data, .*; pad the parts to one"
    )
    in_jax(LINE + message, ragged)
