"""A model of `plait.models` in PyTorch."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.core_ir.op import Array
from plait.extras import load
from plait.models.weights import torch as weights
from plait.workloads.family import parallel_form


def build(
    name: str,
    config: Any,
    *,
    dtype: str,
    abstract: bool,
    mesh: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Callable[..., Any], torch.nn.Module]:
    """Loss function and model; an abstract model lives on `meta` and has no weights.

    mesh: over whose axes the model may be cut; without a process group it is cut as its first rank has it.
    """
    module = load("torch", f"models.{name}.torch")
    with torch.device("meta") if abstract else nullcontext():
        model: torch.nn.Module = module.build(config)
    model = model.bfloat16() if dtype == "bf16" else model
    parallel, _ = parallel_form(name, "torch", "torch", mesh)
    if parallel is None:
        return module.loss_fn, model
    return parallel.distributed_over(model, _device_mesh(mesh)), model


def _device_mesh(mesh: Mapping[str, int]) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=math.prod(mesh.values()))
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(kind, tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def initial_weights(name: str, config: Any) -> dict[str, Array]:
    """The weights that `build` gives a model, by torch's names."""
    return weights.read(load("torch", f"models.{name}.torch").build(config))


def split_paths(cuts: Sequence[int]) -> list[str]:
    """The module paths to cut before."""
    return [f"layers.{cut}" for cut in cuts]
