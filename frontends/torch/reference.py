"""The unpipelined torch step: an eager loop over the microbatches, gradients by autograd."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from plait.core_ir.arrays import is_array, is_torch, to_numpy
from plait.core_ir.op import Array
from plait.core_ir.types import bf16
from plait.frontends.batch import batch_spec
from plait.frontends.reference import Reference


def reference(
    loss_fn: Callable[[Any, Any], Any],
    model: nn.Module,
    batch: Any,
    *,
    num_microbatches: int,
    reduction: Literal["mean", "sum"] = "mean",
    keys: Any = None,
) -> Reference:
    """Loss, gradients by the names of `named_parameters()` and buffers of one step, computed on a copy of the model.

    keys: not used: eager random ops draw from torch's own generator, so their results do not match a pipeline's.
    """
    model = copy.deepcopy(model)
    model.zero_grad()
    losses = []
    for microbatch in _microbatches(batch, num_microbatches, _device(model)):
        loss = loss_fn(model, microbatch)
        scale = 1 / num_microbatches if reduction == "mean" else 1.0
        loss.backward(torch.full_like(loss, scale))
        losses.append(loss.detach() * scale)
    grads = {
        name: to_numpy(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    buffers = {name: to_numpy(buffer) for name, buffer in model.named_buffers()}
    return Reference(to_numpy(torch.stack(losses).sum()), grads, buffers)


def named_gradients(grads: Mapping[str, Any]) -> dict[str, Array]:
    """What `loss_and_grads` gave for a torch model as NumPy arrays by name; without those that are None.

    Of a DTensor the whole: a collective call of the ranks that have parts of it.
    """
    return {
        name: to_numpy(grad.full_tensor() if isinstance(grad, DTensor) else grad)
        for name, grad in grads.items()
        if grad is not None
    }


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _microbatches(batch: Any, num_microbatches: int, device: torch.device) -> list[Any]:
    leaves, treespec = pytree.tree_flatten(batch)
    named = [(str(index), leaf) for index, leaf in enumerate(leaves)]
    spec = batch_spec(named, num_microbatches, narrow=False)
    parts = []
    for arrays in spec.microbatches(named):
        filled = [
            _tensor(arrays[leaf.name], device) if leaf.name in arrays else leaf.value
            for leaf in spec.leaves
        ]
        parts.append(pytree.tree_unflatten(filled, treespec))
    return parts


def _tensor(x: Any, device: torch.device) -> Tensor:
    if is_torch(x):
        tensor: Tensor = x
        return tensor.to(device)
    assert is_array(x), x
    array = to_numpy(x)
    if array.dtype == bf16.numpy:
        return torch.tensor(array.view("int16"), device=device).view(torch.bfloat16)
    return torch.tensor(array, device=device)
