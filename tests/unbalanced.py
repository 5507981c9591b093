"""DeepSeek-V3 with experts over two ranks, whose routers send every token to the same two experts of the first."""

import copy
from typing import Any

import numpy as np
import torch
from flax import nnx
from mesh_cases import CASES, check, compiled, run

from plait.core_ir.arrays import to_numpy
from plait.models.deepseek_v3.moe import flax as moe_flax
from plait.models.deepseek_v3.moe import torch as moe_torch
from plait.workloads.workload import Workload

CASE = CASES["expert"]


def check_unbalanced(frontend: str, backend: str, engine: str, **options: Any) -> None:
    """AssertionError unless loss and gradients are those of the plain model, which drops no token."""
    workload = CASE.workload(frontend)
    assert workload.plain is not None
    plain_loss, plain = workload.plain
    for model in (workload.model, plain):
        _unbalance(model)
    for load in _loads(plain_loss, plain, workload):
        assert load[0] == load[1] == workload.batch["tokens"].size
        assert not load[2:].any()
    pipeline = compiled(CASE, workload, backend=backend, engine=engine, **options)
    loss, grads = run(pipeline, workload)
    is_own = (frontend == "torch") == (backend == "torch")
    check(workload, pipeline, loss, grads, "framework" if is_own else "backends")


def _unbalance(model: Any) -> None:
    for router in _routers(model):
        bias = np.zeros(router.config.num_experts, np.float32)
        bias[:2] = 100.0  # far above any score, for the choice alone; the two are one group
        assert router.config.top_k == 2 == router.config.num_experts // router.config.num_groups
        if isinstance(model, torch.nn.Module):
            router.bias.copy_(torch.tensor(bias))
        else:
            router.bias[...] = bias


def _loads(loss_fn: Any, model: Any, workload: Workload) -> list[Any]:
    """How many tokens each expert of each layer is chosen by."""
    if isinstance(model, torch.nn.Module):
        model = copy.deepcopy(model).train()
        loss_fn(model, {name: torch.tensor(np.asarray(x)) for name, x in workload.batch.items()})
    else:
        model = nnx.clone(model)
        model.set_attributes(moe_flax.MoE, training=True)
        loss_fn(model, workload.batch)
    return [to_numpy(_array(router.counts)) for router in _routers(model)]


def _array(counts: Any) -> Any:
    return counts if isinstance(counts, torch.Tensor) else counts[...]


def _routers(model: Any) -> list[Any]:
    if isinstance(model, torch.nn.Module):
        found = [m for m in model.modules() if isinstance(m, moe_torch.Router)]
    else:
        found = [m for _, m in nnx.iter_modules(model) if isinstance(m, moe_flax.Router)]
    assert len(found) == 3
    return found
