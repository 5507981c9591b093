"""DeepSeek-V3 in PyTorch over a mesh of devices: the model of `torch.py`, its parameters and its loss, on each rank.

Over the *expert axis* routed experts are cut: a rank runs all else on tokens of its own, and tokens go to their experts
and back in an all-to-all (arXiv 2006.16668). With a `capacity_factor` each rank drops tokens by the loads of its own.

There are two ways to give ranks their tokens. With `loss_fn` of this file every rank is given the whole batch and
takes its part of it. With that of `torch.py` each is given another batch, and whoever does so adds up the gradients of
what ranks have alike.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

from plait.models.deepseek_v3.moe.torch import Exchange, Experts, MoE
from plait.models.deepseek_v3.torch import DeepSeekV3
from plait.models.deepseek_v3.torch import loss_fn as plain_loss
from plait.models.over_ranks import Spread, mean
from plait.models.sizes import share

AXES = ("expert",)
"""What the axes are called over which `distributed_over` cuts."""


def distributed_over(model: DeepSeekV3, mesh: DeviceMesh) -> Callable[[DeepSeekV3, Any], Tensor]:
    """Cut a model, in place, over a mesh with AXES; its loss there."""
    expert_parallel(model, mesh["expert"])
    return partial(loss_fn, mesh=mesh["expert"])


def expert_parallel(model: DeepSeekV3, mesh: DeviceMesh) -> DeepSeekV3:
    """Cut the routed experts of a model, in place, over a mesh of one dim. ValueError where they do not divide."""
    model.config.check_mesh({"expert": mesh.size()})
    for module in model.modules():
        if isinstance(module, MoE):
            module.exchange = exchange_over(mesh.get_group())
            distribute_module(module.experts, mesh, _cut)
    return model


def _cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, param in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))


def loss_fn(model: DeepSeekV3, batch: Mapping[str, Tensor], *, mesh: DeviceMesh) -> Tensor:
    """The loss of `torch.loss_fn` for a model whose experts lie over a mesh of one dim, the same on every rank.

    ValueError where the rows of the batch do not divide over the ranks.
    """
    group = mesh.get_group()
    ranks, place = dist.get_world_size(group), dist.get_rank(group)
    length = share(len(batch["tokens"]), ranks, "rows")
    own = {name: x.narrow(0, place * length, length) for name, x in batch.items()}
    cut = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}
    params = {
        name: p if id(p) in cut else Spread.apply(p, group) for name, p in model.named_parameters()
    }

    def on_rank(tokens: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (tokens,))

    return mean(plain_loss(on_rank, own), group)


def exchange_over(group: dist.ProcessGroup) -> Exchange:
    """Slots go to the ranks of a group that have their experts."""
    ranks = dist.get_world_size(group)

    def exchanged(slots: Tensor) -> Tensor:
        return functional.all_to_all_single_autograd(slots, None, None, group)

    def to_experts(slots: Tensor) -> Tensor:
        return exchanged(slots).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)

    def to_tokens(slots: Tensor) -> Tensor:
        by_rank = slots.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
        return exchanged(by_rank.contiguous())

    def total(counts: Tensor) -> Tensor:
        return functional.all_reduce(counts, "sum", group)

    return Exchange(to_experts, to_tokens, total)
