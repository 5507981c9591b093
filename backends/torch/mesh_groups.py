"""The process groups along the axes of a mesh, and the collectives over them, started and waited for.

A group is known by the name of its axis, the same on every rank (`group_name`), so that compiled code, which holds
names alone, serves all ranks. A rank's own place in a group is looked up when the code runs.

NOTE: this is the one file that uses torch's functional collectives and the table of group names, both private. A start
gives a tensor that must not be read before `wait`; for most, Inductor knows that. Tested with torch 2.13.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers what the ops below do to fake tensors
from torch import Tensor
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from plait.backends.torch.storage import copied
from plait.core_ir.ops.collective import group_name

_c10d: Any = torch.ops._c10d_functional
_plait: Any = torch.ops.plait


def _resolved(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(GroupName(name))


def axis_group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """This rank's group along an axis of a mesh, which compiled code then finds by the axis.

    Another group that had this axis before is no longer found by it (it is not destroyed).
    """
    group = mesh.get_group(axis)
    name_axis_group(axis, group)
    return group


def name_axis_group(axis: str, group: dist.ProcessGroup) -> None:
    """Have compiled code find a group by an axis, in place of what it found before."""
    release_axis(axis)
    _register_process_group(GroupName(group_name(axis)), group)


def release_axis(axis: str) -> None:
    """Forget the group of an axis, if there is one. The name of one that is gone is still taken."""
    with suppress(RuntimeError):
        _unregister_process_group(GroupName(group_name(axis)))


# Collectives: tensors are cut and joined along dimension 0.


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else copied(x)


def start_all_gather(x: Tensor, axis: str, size: int) -> Tensor:
    """The tensors of all ranks, joined."""
    result: Tensor = _c10d.all_gather_into_tensor(_contiguous(x), size, group_name(axis))
    return result


def start_reduce_scatter(x: Tensor, axis: str, size: int, reduction: str) -> Tensor:
    """One of `size` parts of the reduction."""
    result: Tensor = _c10d.reduce_scatter_tensor(_contiguous(x), reduction, size, group_name(axis))
    return result


def start_all_reduce(x: Tensor, axis: str, reduction: str) -> Tensor:
    """The reduction."""
    result: Tensor = _c10d.all_reduce(_contiguous(x), reduction, group_name(axis))
    return result


def start_all_to_all(x: Tensor, axis: str, size: int) -> Tensor:
    """Part i of x goes to rank i; the parts that come are joined."""
    splits = [x.shape[0] // size] * size
    result: Tensor = _c10d.all_to_all_single(_contiguous(x), splits, splits, group_name(axis))
    return result


def start_permute(x: Tensor, axis: str, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """x of `source` on `target`, flat; zeros on a rank that is no target."""
    flat = [rank for pair in pairs for rank in pair]
    result: Tensor = _plait.permute(x, flat, group_name(axis))
    return result


def wait(x: Tensor) -> Tensor:
    """The tensor that a collective has started to write, once it is there."""
    result: Tensor = _c10d.wait_tensor(x)
    return result


def axis_index(axis: str, device: torch.device) -> Tensor:
    """The place of this rank along an axis, i32[]."""
    result: Tensor = _plait.axis_index(group_name(axis), device)
    return result


# What depends on the rank is looked up inside an op, so that no graph holds it.


@torch.library.custom_op("plait::axis_index", mutates_args=())
def _axis_index(group: str, device: torch.device) -> Tensor:
    rank = _resolved(group).rank()
    return torch.full((), rank, dtype=torch.int32, device=device)


@_axis_index.register_fake
def _(group: str, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int32, device=device)


@torch.library.custom_op("plait::permute", mutates_args=())
def _permute(x: Tensor, pairs: Sequence[int], group: str) -> Tensor:
    """Every rank receives as much as it has: one that is no target, zeros from itself.

    What is sent is a copy: compilers may write over x before the wait.
    """
    members = _resolved(group)
    rank, flat = members.rank(), x.reshape(-1)
    sources, targets = pairs[::2], pairs[1::2]
    sent = {t: flat for s, t in zip(sources, targets, strict=True) if s == rank}
    source = next((s for s, t in zip(sources, targets, strict=True) if t == rank), None)
    if source is None:
        source = rank
        sent[rank] = torch.zeros_like(flat)
    parts = [sent[t] for t in sorted(sent)]
    to, from_ = [0] * members.size(), [0] * members.size()
    for target in sent:
        to[target] = flat.numel()
    from_[source] = flat.numel()
    together = torch.cat(parts) if parts else flat.new_empty(0)
    result: Tensor = _c10d.all_to_all_single(together, from_, to, group)
    return result


@_permute.register_fake
def _(x: Tensor, pairs: Sequence[int], group: str) -> Tensor:
    return x.new_empty(x.numel())
