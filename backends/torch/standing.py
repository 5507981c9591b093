"""Where this process stands in a mesh: the groups of ranks to which it belongs, one for each thing done together.

Groups along axes that the program names are found by compiled code under the name of the axis, the same on every rank.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from plait.backends.torch.mesh_groups import name_axis_group
from plait.backends.torch.process_group import Group, Members
from plait.core_ir.mesh import Layout, Mesh, axes_of, part_of
from plait.core_ir.types import TensorType

T = TypeVar("T")


class Standing:
    """A rank's place in a mesh, and its groups. Made on every rank at once.

    shard_axis: along which parameters are sharded, and gradients reduced by tasks.

    Attributes
    ----------
    part: the number of the part of every microbatch that it runs.
    pipe: the ranks of its pipeline, by stage place. twins: those that differ along data axes alone; replicas: along
        those of them that the program does not name.
    """

    def __init__(
        self, mesh: Mesh, group: Group, layouts: Mapping[str, Layout], shard_axis: str | None = None
    ) -> None:
        self.mesh, self.group, self._layouts = mesh, group, dict(layouts)
        self.place = mesh.place(group.rank)
        self.part = mesh.part(group.rank)
        self.pipe = group.part(mesh.groups((mesh.stage_axis,)))
        self.twins = group.part(mesh.groups(mesh.data_axes))
        self.replicas = self.twins
        if mesh.replica_axes != mesh.data_axes:
            self.replicas = group.part(mesh.groups(mesh.replica_axes))
        self._fellows = group.part(mesh.groups(mesh.other_axes))
        cutting = {axis: None for layout in layouts.values() for axis in axes_of(layout)}
        self._shard_axis = shard_axis
        self._named = dict.fromkeys((*mesh.named_axes, *((shard_axis,) if shard_axis else ())))
        along = dict.fromkeys((*self._named, *cutting))
        self._axes = {axis: group.part(mesh.groups((axis,))) for axis in along}
        names = ("", *layouts, *mesh.partial_grads)
        summed = [mesh.summed_axes(name, layouts.get(name, ())) for name in names]
        summed += [self._unreduced(axes) for axes in summed]
        self._sums = {axes: group.part(mesh.groups(axes)) for axes in dict.fromkeys(summed)}

    def enter(self) -> None:
        """Have compiled code find this mesh's groups by the names of their axes, from here on."""
        for axis in self._named:
            if self._axes[axis].size > 1:
                name_axis_group(axis, self._axes[axis].process_group)

    def in_turn(self, compile_: Callable[[], T]) -> T:
        """What `compile_` gives. Ranks of one stage compile the same: on each host one goes first, and the others find
        its code in the compiler's cache instead of writing it at the same time."""
        if self._fellows.size == 1:
            return compile_()
        hosts = self._fellows.gather(socket.gethostname())
        is_first = hosts.index(hosts[self._fellows.rank]) == self._fellows.rank
        try:
            made = compile_() if is_first else None
        finally:
            self._fellows.gather(None)
        return compile_() if made is None else made

    # Arrays that are cut.

    def own(self, arrays: Mapping[str, Any], types: Mapping[str, TensorType]) -> dict[str, Any]:
        """This rank's parts of parameters and buffers by name, of those that are given whole."""
        return {name: self._part(name, array, types) for name, array in arrays.items()}

    def _part(self, name: str, array: Any, types: Mapping[str, TensorType]) -> Any:
        layout = self._layouts.get(name, ())
        if not axes_of(layout) or tuple(array.shape) == types[name].shape:
            return array
        return part_of(array, layout, self.mesh.axes, self.place)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole of what each rank has a part of. A collective call along the axes that cut it."""
        for dim, over in enumerate(self._layouts.get(name, ())):
            for axis in reversed(over):  # the innermost varies fastest
                part = torch.cat(self._axes[axis].gather_tensor(part), dim)
        return part

    def sums(self, name: str) -> Members:
        """The ranks over which the gradient of a parameter is added up."""
        return self._sums[self.mesh.summed_axes(name, self._layouts.get(name, ()))]

    def sums_of_reduced(self, name: str) -> Members:
        """The ranks over which a gradient that is reduced along the axis of the shards is yet to be added up."""
        return self._sums[self._unreduced(self.mesh.summed_axes(name, self._layouts.get(name, ())))]

    def _unreduced(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis != self._shard_axis)

    def joined(self, shard: torch.Tensor) -> torch.Tensor:
        """The shards of all ranks, one behind the other. A collective call along their axis."""
        assert self._shard_axis is not None
        return torch.cat(self._axes[self._shard_axis].gather_tensor(shard))

    def counts(self, name: str, *, is_shard: bool = False) -> bool:
        """Whether a number for this rank's part of a parameter counts here, so that each part counts once."""
        cut = axes_of(self._layouts.get(name, ()))
        if is_shard and self._shard_axis is not None:
            cut = (*cut, self._shard_axis)
        return all(self.place[axis] == 0 for axis in self.mesh.other_axes if axis not in cut)
