"""DTensors, as this rank sees them: its local part, and how the whole lies over the axes of the mesh.

A captured program is about local parts. What crosses the user's border, parameters and their gradients, are DTensors.

NOTE: `_local_tensor` and `_StridedShard` are private. Tested with torch 2.13.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss
from torch.distributed.tensor.placement_types import _StridedShard

from plait.core_ir.errors import CaptureError, UsageError
from plait.core_ir.mesh import Layout, Mesh, part_type
from plait.core_ir.types import TensorType
from plait.frontends.torch.dtypes import type_of
from plait.frontends.torch.fsdp import Unsharded, sharded_params
from plait.frontends.torch.groups import axes_of


def local_part(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is. Without autograd."""
    return x._local_tensor if isinstance(x, DTensor) else x


def like(part: Any, x: Tensor) -> Any:
    """A local part as a DTensor, where `x` is one that is cut in the same way; else the part."""
    if not isinstance(x, DTensor) or not isinstance(part, Tensor):
        return part
    return DTensor.from_local(
        part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def whole(x: Any) -> Any:
    """The value of a DTensor, the same on all of its ranks; anything else as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def axes_of_model(model: nn.Module, mesh: Mesh) -> frozenset[str]:
    """The axes that some parameter or buffer is cut over; those of a tensor that has no layout aside."""
    cut: set[str] = set()
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        with suppress(CaptureError):
            cut |= {axis for axes in layout_of(name, x, mesh) for axis in axes}
    return frozenset(cut)


def layout_of(name: str, x: Tensor, mesh: Mesh | None) -> Layout:
    """How a tensor of the model lies over the axes of the mesh. CaptureError for one that has no layout."""
    if not isinstance(x, DTensor):
        return ()
    what = f"{name!r} of the model, a DTensor"
    cuts: dict[int, list[tuple[str, ...]]] = {}
    for number, placement in reversed(list(enumerate(x.placements))):
        axes = axes_of(x.device_mesh.get_group(number), mesh, what)
        size = math.prod(mesh.axes[axis] for axis in axes) if mesh is not None else 1
        if isinstance(placement, Replicate) or size == 1:
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise CaptureError(
                f"{what}, has placement {placement}: a parameter or a buffer must be whole or cut on each rank; "
                "redistribute it to Replicate() or Shard(dim)"
            )
        inside = cuts.setdefault(placement.dim, [])
        inside.insert(_outside_of(placement, inside, mesh, what), axes)
    layout = tuple(
        tuple(axis for axes in cuts.get(dim, ()) for axis in axes)
        for dim in range(max(cuts, default=-1) + 1)
    )
    if mesh is not None:
        _check_even(x, layout, mesh, what)
    return layout


def _outside_of(
    placement: Any, inside: Sequence[tuple[str, ...]], mesh: Mesh | None, what: str
) -> int:
    """How many of the cuts along later dims of the device mesh are made before this one."""
    wanted = placement.split_factor if isinstance(placement, _StridedShard) else 1
    made = 1
    for count in range(len(inside) + 1):
        if made == wanted:
            return count
        if count < len(inside) and mesh is not None:
            made *= math.prod(mesh.axes[axis] for axis in inside[count])
    raise CaptureError(
        f"{what}, has placement {placement}, which is no order of cuts over the axes of the mesh"
    )


def _check_even(x: DTensor, layout: Layout, mesh: Mesh, what: str) -> None:
    part = type_of(local_part(x))
    try:
        even = part_type(TensorType(part.dtype, tuple(x.shape)), layout, mesh.axes)
    except UsageError as error:
        raise CaptureError(f"{what}: {error}; choose a size that divides, or pad it") from error
    if even != part:
        raise CaptureError(
            f"{what} of shape {list(x.shape)}, has placements {x.placements}, by which a rank holds {even}; this one "
            f"holds {part}"
        )


class _Entered(torch.autograd.Function):
    """A parameter as the forward reads it; its gradient comes back cut as the parameter is.

    NOTE: eager leaves in `.grad` what placement the backward happens to give, such as a partial sum.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.placements = x.placements
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Tensor:
        return grad.redistribute(placements=ctx.placements)


@contextmanager
def entered(model: nn.Module, mesh: Mesh | None) -> Iterator[None]:
    """Inside, the gradients of parameters that are DTensors are redistributed to the placements of the parameters.

    Those that FSDP has sharded are gathered.
    """
    sharded = sharded_params(model, mesh)
    held = [
        (module._parameters, name, param, sharded.get((id(module), name)))
        for module in model.modules()
        for name, param in module._parameters.items()
        if isinstance(param, DTensor)
    ]
    seen: dict[int, Any] = {}
    for table, name, param, how in held:
        if id(param) not in seen:
            apply: Any = _Entered.apply if how is None else Unsharded.apply
            seen[id(param)] = apply(param) if how is None else apply(param, how)
        table[name] = seen[id(param)]
    try:
        yield
    finally:
        for table, name, param, _ in held:
            if table.get(name) is seen[id(param)]:  # else the forward put another there
                table[name] = param


@contextmanager
def loss_parallel_kept() -> Iterator[None]:
    """A `loss_parallel` that the forward enters is left at the end only, after the backward, which needs it too."""
    leave: Any = loss._disable_custom_loss_ops
    with mock.patch.object(loss, "_disable_custom_loss_ops") as left:
        try:
            yield
        finally:
            if left.called:
                leave()
