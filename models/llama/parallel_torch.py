"""Llama in PyTorch over a mesh of devices: the model of `torch.py`, its parameters and its loss, on each rank.

Shapes are those of one rank: B batch, T time, D model dim, N heads, K key-value heads, H head dim, V vocabulary.

- Over the *model axis* heads, hidden dims and the vocabulary are cut, parameters are DTensors, and what each rank makes
  of its part is added up behind attention and MLP (arXiv 1909.08053, section 3). With `sequence_parallel` the residual
  stream is cut along time there (arXiv 2205.05198, section 4.2.2): sums are scattered, and gathered where the next part
  is entered.
- Over the *context axis* the sequence is cut. Keys and values go round the ranks in a ring, and what a rank's queries
  find in each part is merged by its log-sum-exp (arXiv 2310.01889).

Every rank is given the whole batch, and returns the whole loss.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from plait.models.llama.config import WHOLE_AXES
from plait.models.llama.torch import Attention, Llama
from plait.models.llama.torch import loss_fn as plain_loss
from plait.models.over_ranks import Spread, mean
from plait.models.sizes import share

_UNSEEN = -1e30


AXES = WHOLE_AXES
"""What the axes are called over which `distributed_over` cuts."""


@dataclass(frozen=True)
class Form:
    """Over which axes of a mesh what is cut; None: nothing."""

    mesh: DeviceMesh
    model_axis: str | None = None
    context_axis: str | None = None
    sequence_parallel: bool = False


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Cut a model, in place, over a mesh of one dim: heads, hidden dims, the vocabulary.

    ValueError where they do not divide.
    """
    model.config.check_mesh({"tensor": mesh.size()})
    layer: dict[str, ParallelStyle] = {
        **{f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attn.wo": RowwiseParallel(),
        **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "mlp.w2": RowwiseParallel(),
    }
    outside: dict[str, ParallelStyle] = {
        "tok_embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return _parallelized(model, mesh, layer, outside)


def sequence_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """As `tensor_parallel`, and between attention and MLP the residual stream is cut along time."""
    model.config.check_mesh({"tensor": mesh.size()})
    part, whole = Shard(1), Replicate()
    layer: dict[str, ParallelStyle] = {
        "attn_norm": SequenceParallel(),
        "attn": PrepareModuleInput(
            input_layouts=(part, None, None),
            desired_input_layouts=(whole, None, None),
        ),
        **{f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attn.wo": RowwiseParallel(output_layouts=part),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        **{f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "mlp.w2": RowwiseParallel(output_layouts=part),
    }
    outside: dict[str, ParallelStyle] = {
        "tok_embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=part, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    return _parallelized(model, mesh, layer, outside)


def context_parallel(model: Llama, group: dist.ProcessGroup) -> Llama:
    """Have a model attend, in place, where each rank of the group has a part of the sequence, in order of ranks."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = Ring(group)
    return model


def distribute(model: Llama, form: Form) -> Llama:
    """Give a model a form, in place."""
    if form.model_axis is not None:
        cut = sequence_parallel if form.sequence_parallel else tensor_parallel
        cut(model, form.mesh[form.model_axis])
    if form.context_axis is not None:
        context_parallel(model, form.mesh.get_group(form.context_axis))
    return model


def distributed_over(model: Llama, mesh: DeviceMesh) -> Callable[[Llama, Any], Tensor]:
    """Cut a model, in place, over those of AXES that a mesh has; its loss there, of a stream of whole positions."""
    names = mesh.mesh_dim_names or ()
    tensor, context = (axis if axis in names else None for axis in AXES)
    form = Form(mesh, tensor, context)
    distribute(model, form)
    return partial(loss_fn, form=form)


def loss_fn(model: Llama, batch: Mapping[str, Tensor], *, form: Form) -> Tensor:
    """The loss of `torch.loss_fn` for a model in that form, the same on every rank.

    ValueError where positions do not divide over the ranks of the context axis.

    NOTE: over a model axis a backward has to run under `torch.distributed.tensor.parallel.loss_parallel` too.
    """
    with nullcontext() if form.model_axis is None else loss_parallel():
        if form.context_axis is None:
            return plain_loss(model, batch)
        group = form.mesh.get_group(form.context_axis)
        ranks, place = dist.get_world_size(group), dist.get_rank(group)
        length = share(batch["tokens"].shape[1], ranks, "positions")
        start = place * length
        own = {name: x.narrow(1, start, length) for name, x in batch.items()}
        params = {name: Spread.apply(p, group) for name, p in model.named_parameters()}

        def from_start(tokens: Tensor) -> Tensor:
            return torch.func.functional_call(model, params, (tokens, start))

        return mean(plain_loss(from_start, own), group)


class Ring:
    """Causal attention of a rank's queries to the keys of all ranks of a group.

    f[B, N, T, H], f[B, K, T, H] twice -> f[B, N, T, H].
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, length = dist.get_world_size(self.group), q.shape[2]
        place = torch.tensor(dist.get_rank(self.group), device=q.device)
        positions = torch.arange(length, device=q.device)
        onwards = [(rank + 1) % ranks for rank in range(ranks)]
        out, lse = partial_attention(q, k, v, positions[:, None] >= positions)
        kv = torch.stack((k, v))
        for step in range(1, ranks):
            kv = functional.permute_tensor(kv.flatten(), onwards, self.group).view_as(kv)
            # These are of the rank that stands `step` places before: all of them earlier, or all of them later.
            seen = (place >= step).expand(length, length)
            out, lse = merged(out, lse, *partial_attention(q, kv[0], kv[1], seen))
        return out.to(q.dtype)


def partial_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """What queries find in some keys, and the log-sum-exp of their scores; bool[T, S] -> f32[B, N, T, H], f32[B, N, T].

    Where a query sees none of the keys the latter is very low, and the former has no weight in a sum.
    """
    grouped = q.unflatten(1, (k.shape[1], -1)).float()
    scores = grouped @ k[:, :, None].float().mT * q.shape[-1] ** -0.5
    scores = torch.where(seen, scores, _UNSEEN)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().to(v.dtype)
    out = weights.float() @ v[:, :, None].float()
    return out.flatten(1, 2), lse.flatten(1, 2)


def merged(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """What queries find in two sets of keys together."""
    total = torch.logaddexp(lse, other_lse)
    first, second = (lse - total).exp(), (other_lse - total).exp()
    return out * first[..., None] + other * second[..., None], total


def _parallelized(
    model: Llama,
    mesh: DeviceMesh,
    layer: Mapping[str, ParallelStyle],
    outside: Mapping[str, ParallelStyle],
) -> Llama:
    for block in model.layers:
        parallelize_module(block, mesh, dict(layer))
    parallelize_module(model, mesh, dict(outside))
    if model.config.tied_head:
        model.head.weight = model.tok_embed.weight
    return model
