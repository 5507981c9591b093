"""Standing at another place of the mesh while a model is captured: whatever asks for its rank is told the one of there.

Groups stay those of this process: one along an axis has the same meaning wherever the process stands along others.

NOTE: what DTensor and DeviceMesh ask is private. Tested with torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from plait.core_ir.mesh import Mesh, Place
from plait.frontends.torch.groups import known_axes, rank_in
from plait.frontends.torch.replacing import Functions, replaced

_get_coordinate = DeviceMesh.get_coordinate
_get_rank, _get_group_rank = distributed_c10d.get_rank, distributed_c10d.get_group_rank


@dataclass
class Stand:
    """A place in a mesh, and the axes along which the model has asked for it."""

    mesh: Mesh
    place: Place
    asked: set[str] = field(default_factory=set)
    _axes: dict[str, tuple[str, ...] | None] = field(default_factory=dict)

    def number_in(self, group: Any) -> int:
        """The rank in a group; the one of this process in a group that is along no axes."""
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = known_axes(group, self.mesh)
        axes = self._axes[name]
        if axes is None:
            return rank_in(group)
        self.asked.update(axes)
        number = 0
        for axis in axes:
            number = number * self.mesh.axes[axis] + self.place[axis]
        return number

    def get_rank(self, group: Any = None) -> int:
        """In place of `torch.distributed.get_rank`."""
        if isinstance(group, dist.ProcessGroup):
            return self.number_in(group)
        if group is not None and group is not dist.group.WORLD:
            return _get_rank(group)
        self.asked.update(self.mesh.axes)
        return self.mesh.rank(self.place)

    def get_group_rank(self, group: Any, global_rank: int) -> int:
        """In place of `torch.distributed.get_group_rank`."""
        if global_rank == self.mesh.rank(self.place):
            return self.get_rank(group)
        return _get_group_rank(group, global_rank)

    def coordinate(self, mesh: DeviceMesh) -> tuple[int, ...] | None:
        """In place of `DeviceMesh.get_coordinate`."""
        real = _get_coordinate(mesh)
        if real is None:
            return None
        return tuple(self._along(mesh, dim, number) for dim, number in enumerate(real))

    def _along(self, mesh: DeviceMesh, dim: int, real: int) -> int:
        try:
            group = mesh.get_group(dim)
        except RuntimeError:  # a mesh without groups
            return real
        return self.number_in(group)


@contextmanager
def standing(stand: Stand) -> Iterator[None]:
    """Inside, the rank and the coordinates of this process are those of a place."""

    def coordinate_along(mesh: DeviceMesh, dim: int) -> int:
        coordinate = stand.coordinate(mesh)
        assert coordinate is not None
        return coordinate[dim]

    methods: dict[tuple[type, str], Callable[..., Any]] = {
        (dist.ProcessGroup, "rank"): stand.number_in,
        (DeviceMesh, "get_coordinate"): stand.coordinate,
        (DeviceMesh, "_sym_get_coordinate"): coordinate_along,
    }
    functions: Functions = {
        "get_rank": (_get_rank, stand.get_rank),
        "get_group_rank": (_get_group_rank, stand.get_group_rank),
    }
    with ExitStack() as stack:
        stack.enter_context(replaced(functions))
        for (owner, name), method in methods.items():
            stack.enter_context(mock.patch.object(owner, name, _method(method)))
        yield


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that becomes a method of the class it is put into."""
    return lambda self, *args: function(self, *args)
