"""The axes of the mesh along which the ranks of a process group stand.

NOTE: groups are found in torch's own table of names, which is private. Tested with torch 2.13.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401  registers the ops and what they do to fake tensors
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName, get_process_group_ranks

from plait.core_ir.errors import UnsupportedError, UsageError
from plait.core_ir.graph import Source
from plait.core_ir.mesh import Mesh
from plait.core_ir.ops.collective import group_name

COMMUNICATION = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of ops that ranks run together."""

_PREFIX = group_name("")
_rank: Callable[[dist.ProcessGroup], int] = dist.ProcessGroup.rank
"""As it is when nothing stands in for it."""


def axes_of(group: Any, mesh: Mesh | None, what: str) -> tuple[str, ...]:
    """The axes of a group, given by its name or itself, the outermost first; none for a group of this rank alone.

    A group is along one axis, or several, if its members are those of the mesh; or it has an axis by its name. `what`
    is over the group, and where it stands.

    Raises UnsupportedError where it is along no axis but the stages', or none is known; UsageError where the mesh is of
    another number of ranks than the run.
    """
    found = _resolved(group, what)
    axis = _axis_by_name(group)
    members = get_process_group_ranks(found)
    if len(members) == 1 and (axis is None or mesh is None):
        return ()
    if mesh is None:
        raise UnsupportedError(
            f"{what} over {_named(group)} of ranks {members}, but no mesh is given; pass mesh= with the "
            'axis along which these ranks stand, for instance {"stage": 2, "tensor": 2}'
        )
    check_world(mesh)
    axes = (axis,) if axis is not None else _axes_by_members(group, members, mesh, what)
    if axis is not None and mesh.axes.get(axis) != len(members):
        raise UnsupportedError(
            f"{what} over {_named(group)} of {len(members)} ranks, but the mesh {dict(mesh.axes)} has no axis "
            f"{axis!r} of that many; pass mesh= with it, or a group along an axis that the mesh has"
        )
    if mesh.stage_axis in axes:
        raise UnsupportedError(
            f"{what} over {_named(group)}, which is along {mesh.stage_axis!r}, the axis of the stages; "
            "stages run different parts of the model and meet at its boundaries alone: use another axis"
        )
    return axes


def known_axes(group: dist.ProcessGroup, mesh: Mesh) -> tuple[str, ...] | None:
    """The axes of a group, that of the stages too; None where it is along none."""
    axis = _axis_by_name(group)
    if axis is not None:
        return (axis,) if axis in mesh.axes else None
    members = tuple(get_process_group_ranks(group))
    if len(members) == 1:
        return ()
    return next((axes for axes, ranks in _own_groups(mesh).items() if ranks == members), None)


def rank_in(group: dist.ProcessGroup) -> int:
    """The rank of this process in a group, whatever stands in for it."""
    return _rank(group)


def own_rank() -> int:
    """The rank of this process, whatever stands in for it."""
    world = dist.group.WORLD
    assert world is not None
    return _rank(world)


def size_of(group: Any, where: Source) -> int:
    """The number of ranks of a group. UnsupportedError where this process does not know the group."""
    return int(_resolved(group, f"{where}: a collective").size())


def check_world(mesh: Mesh) -> None:
    """UsageError where the run has another number of ranks than the mesh."""
    if dist.get_world_size() != mesh.num_ranks:
        raise UsageError(
            f"the mesh {dict(mesh.axes)} is of {mesh.num_ranks} ranks, the run of {dist.get_world_size()}; in one "
            "process a group of that many can stand in for the others: "
            f'torch.distributed.init_process_group("fake", rank=0, world_size={mesh.num_ranks})'
        )


def _resolved(group: Any, what: str) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    try:
        return _resolve_process_group(GroupName(str(group)))
    except RuntimeError as error:
        raise UnsupportedError(
            f"{what} over process group {group!r}, which this process has not made: {error}"
        ) from error


def _axis_by_name(group: Any) -> str | None:
    name = str(getattr(group, "group_name", group))
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None


def _axes_by_members(group: Any, members: Sequence[int], mesh: Mesh, what: str) -> tuple[str, ...]:
    rank, own = own_rank(), _own_groups(mesh)
    for axes, ranks in own.items():
        if ranks == tuple(members):
            return axes
    known = ", ".join(f"{list(own[axis,])} along {axis!r}" for (axis, *more) in own if not more)
    raise UnsupportedError(
        f"{what} over {_named(group)} of ranks {members}, which do not stand along an axis of the mesh "
        f"{dict(mesh.axes)}; rank {rank} stands with ranks {known or '(nobody)'}. Ranks stand in a mesh in row-major "
        f"order; a group can also have an axis by its name, {group_name('AXIS')!r}"
    )


def _own_groups(mesh: Mesh) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The ranks that differ from this one along some axes alone, by these axes; those of one axis first."""
    rank = own_rank()
    long = [axis for axis, size in mesh.axes.items() if size > 1]
    choices = [c for count in range(1, len(long) + 1) for c in combinations(long, count)]
    return {c: next(ranks for ranks in mesh.groups(c) if rank in ranks) for c in choices}


def _named(group: Any) -> str:
    return f"process group {str(getattr(group, 'group_name', group))!r}"
