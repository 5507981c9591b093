"""The parameters and buffers of a torch model: their port names, tied ones, and fake stand-ins for capture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plait.core_ir.errors import CaptureError, UsageError
from plait.core_ir.mesh import Mesh
from plait.frontends.captured import Leaf
from plait.frontends.torch.dtensors import layout_of, like, local_part
from plait.frontends.torch.dtypes import type_of


@dataclass(frozen=True)
class ModelState:
    """What a model holds.

    leaves: parameters, then buffers, in the model's order; a tied one stands once, under its first name. Of a DTensor
        the part that this rank holds.
    first_names: every name, aliases too, to the name of its leaf.
    wholes: the tensors that are DTensors, by the name of their leaf.
    """

    leaves: tuple[Leaf, ...]
    first_names: dict[str, str]
    wholes: dict[str, Tensor]

    def aliases(self, name: str) -> list[str]:
        """All names of a leaf."""
        return [alias for alias, first in self.first_names.items() if first == name]


def model_state(model: nn.Module, mesh: Mesh | None = None) -> ModelState:
    """Read names, types, layouts and ties.

    CaptureError for what cannot be captured: hooks on parameters, tensor subclasses other than DTensor.
    """
    leaves: list[Leaf] = []
    first_names: dict[str, str] = {}
    wholes: dict[str, Tensor] = {}
    firsts: dict[int, str] = {}
    for name, tensor in _named_tensors(model):
        first = first_names[name] = firsts.setdefault(id(tensor), name)
        if first != name:
            continue
        _check(name, tensor)
        is_param = isinstance(tensor, nn.Parameter)
        leaf = Leaf(
            name,
            type_of(local_part(tensor)),
            "param" if is_param else "buffer",
            is_param and tensor.requires_grad,
            layout_of(name, tensor, mesh),
        )
        leaves.append(leaf)
        if isinstance(tensor, DTensor):
            wholes[name] = tensor
    return ModelState(tuple(leaves), first_names, wholes)


def read_leaves(model: nn.Module, state: ModelState) -> dict[str, Tensor]:
    """The model's tensors by leaf name: detached, not copied; the local parts of DTensors."""
    tensors = dict(_named_tensors(model))
    return {leaf.name: local_part(tensors[leaf.name]).detach() for leaf in state.leaves}


@contextmanager
def fake_tensors(model: nn.Module, mode: Any, device: torch.device) -> Iterator[None]:
    """Inside, the model holds fake tensors on `device` in place of its own; each name its own, tied or not."""
    held = [
        (table, name, tensor)
        for module in model.modules()
        for table in _tables(module)
        for name, tensor in table.items()
        if tensor is not None
    ]
    try:
        for table, name, tensor in held:
            table[name] = _fake(tensor, mode, device)
        yield
    finally:
        for table, name, tensor in held:
            table[name] = tensor


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _fake(tensor: Tensor, mode: Any, device: torch.device) -> Tensor:
    part = local_part(tensor)
    with mode:
        empty = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=device)
        fake: Tensor = like(empty, tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check(name: str, tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, DTensor):
        raise CaptureError(
            f"{name!r} is a {type(tensor).__module__}.{type(tensor).__qualname__}; only plain tensors and parameters, "
            "and DTensors, can be captured: materialise or unwrap it first"
        )
    if tensor.is_inference():
        raise CaptureError(
            f"{name!r} was made under torch.inference_mode, so autograd cannot use it; build the model outside"
        )
    if isinstance(tensor, nn.Parameter) and tensor._backward_hooks:
        raise CaptureError(
            f"parameter {name!r} has a tensor hook (register_hook), which expects each contribution to the gradient as "
            "autograd computes it; use register_post_accumulate_grad_hook, which fires once a step"
        )
    if tensor.layout != torch.strided:
        raise UsageError(f"{name!r} has layout {tensor.layout}; only dense tensors can be captured")
