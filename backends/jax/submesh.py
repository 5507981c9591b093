"""Where one rank of the stage axis runs: a device, or a submesh of devices over all other axes of the mesh.

What tasks exchange may differ from device to device, so on a submesh it stands in one array with a dim in front, along
which each device has one entry; parameters and buffers stand there whole, cut as their layouts say. On one device
arrays are what the types say.

Along auto axes all devices have one entry together, and how that lies over them is the compiler's to choose, but for
parameters, their gradients, and what leaves the tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from plait.backends.jax.devices import devices_for
from plait.backends.jax.private import spec
from plait.core_ir import mesh as core_mesh
from plait.core_ir.graph import Port
from plait.core_ir.mesh import Layout, whole_type
from plait.core_ir.shards import shard_layout
from plait.core_ir.types import TensorType


@dataclass(frozen=True)
class Spread:
    """How the values that a submesh's devices hold make up one array.

    layout: which axes cut the array's dims. is_led: whether a dim stands before those of the type. placement: which
    auto axes cut the dims of the type.
    """

    layout: Layout = ()
    is_led: bool = False
    placement: Layout = ()

    @property
    def cuts(self) -> Layout:
        """All axes that cut the array's dims."""
        placement = ((), *self.placement) if self.is_led else self.placement
        return tuple(a + b for a, b in zip_longest(self.layout, placement, fillvalue=()))


@dataclass(frozen=True)
class Spreads:
    """How the values of a program are spread over the submeshes of a mesh; without one nothing is.

    shard_axis: the axis over which parameters are sharded, if any are. counted: buffers in which each device counts
    from zero.
    """

    mesh: core_mesh.Mesh | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    shard_axis: str | None = None
    counted: frozenset[str] = frozenset()

    @cached_property
    def rows(self) -> Spread:
        """An array whose dim 0 the devices hold parts of, one after the other."""
        return Spread((() if self.mesh is None else self.mesh.manual_axes,))

    @cached_property
    def by_device(self) -> Spread:
        """A value of which each device has its own."""
        return Spread(self.rows.layout, is_led=True)

    @cached_property
    def by_part(self) -> Spread:
        """A value of which each part of a microbatch has its own."""
        return Spread((() if self.mesh is None else self.mesh.data_axes,), is_led=True)

    def layout(self, name: str) -> Layout:
        """Of a parameter or a buffer."""
        return self.layouts.get(name, ())

    def param(self, name: str) -> Spread:
        """Of a parameter or a buffer, whole."""
        return Spread(self.layout(name), placement=self._placement(name))

    def shard(self, name: str) -> Spread:
        """Of the shards of a parameter, whose rows no auto axis cuts."""
        layout, placement = self.layout(name), self._placement(name)
        if self.shard_axis is not None:
            layout = shard_layout(layout, self.shard_axis)
        return Spread(layout, placement=((), *placement[1:]) if placement else ())

    def gradient(self, name: str) -> Spread:
        """Of a parameter's gradient, of which each device has its own."""
        return replace(self.by_device, placement=self._placement(name))

    def _placement(self, name: str) -> Layout:
        return () if self.mesh is None else self.mesh.placements.get(name, ())

    def is_placed(self, name: str) -> bool:
        """Whether it is known how a parameter lies over auto axes."""
        return bool(self._placement(name))

    @property
    def has_auto(self) -> bool:
        """Whether the compiler chooses how some values lie."""
        return self.mesh is not None and bool(self.mesh.auto_axes)

    def of(self, port: Port) -> Spread:
        """Of what stands at a port of a task."""
        match port.role:
            case "buffer" | "buffer_update" if port.name in self.counted:
                return self.by_device
            case "param" | "buffer" | "buffer_update":
                return self.param(port.name)
            case "param_grad":
                return self.gradient(port.name)
            case "shard":
                return self.shard(port.name)
            case "batch" | "rng_key":
                return self.by_part
            case "loss_grad":
                return Spread()
        return self.by_device


@dataclass(frozen=True)
class Submesh:
    """Devices in the order of ranks. mesh: them over the other axes; None: one device, on which nothing is spread.
    auto: the axes that are left to the compiler."""

    devices: tuple[jax.Device, ...]
    mesh: Mesh | None = None
    auto: tuple[str, ...] = ()

    def sharding(self, spread: Spread) -> Sharding:
        """Where the parts of a spread array lie."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, spec(*spread.cuts))

    def spread(self, sharding: Sharding) -> Spread:
        """The spread of a led array that lies so."""
        if not isinstance(sharding, NamedSharding):
            return Spread()
        dims = [over if isinstance(over, tuple) else (over,) for over in sharding.spec]
        cuts = tuple(tuple(axis for axis in over if axis is not None) for over in dims)
        manual = tuple(axis for axis in sharding.mesh.axis_names if axis not in self.auto)
        return Spread((manual,), is_led=True, placement=cuts[1:])

    def where(self, spread: Spread) -> Sharding | jax.Device:
        """The same for `device_put`, to which a device says as much as a sharding over it, and sooner."""
        return self.devices[0] if self.mesh is None else self.sharding(spread)

    def type(self, type: TensorType, spread: Spread) -> TensorType:
        """The type of the array in which values of that type are spread."""
        if self.mesh is None:
            return type
        if spread.is_led:
            type = type.with_shape((1, *type.shape))
        return whole_type(type, spread.layout, dict(self.mesh.shape))

    def over(
        self,
        function: Callable[..., tuple[jax.Array, ...]],
        reads: Sequence[Spread],
        gives: Sequence[Spread | None],
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """What every device runs on its own values, as a function of spread arrays. gives: None is led."""
        if self.mesh is None:
            return function

        def on_a_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            own = [
                lax.squeeze(x, (0,)) if s.is_led else x for x, s in zip(arrays, reads, strict=True)
            ]
            results = zip(function(*own), given, strict=True)
            return tuple(lax.expand_dims(y, (0,)) if s.is_led else y for y, s in results)

        manual = frozenset(self.mesh.axis_names) - {*self.auto}
        given = [self._chosen if s is None else s for s in gives]
        if not manual:
            return on_a_device

        # What varies along an axis is not tracked: tasks hold no derivatives to which a sum could be added.
        return jax.shard_map(
            on_a_device,
            mesh=self.mesh,
            in_specs=tuple(spec(*s.layout) for s in reads),
            out_specs=tuple(spec(*s.layout) for s in given),
            axis_names=manual,
            check_vma=False,
        )

    @property
    def _chosen(self) -> Spread:
        """Of what lies as the compiler chooses."""
        assert self.mesh is not None
        return Spread((tuple(a for a in self.mesh.axis_names if a not in self.auto),), is_led=True)


def submeshes(mesh: core_mesh.Mesh | None, devices: Sequence[jax.Device]) -> tuple[Submesh, ...]:
    """The devices of each rank of the stage axis; without a mesh each of the devices.

    UsageError where there are fewer devices than ranks of the mesh.
    """
    if mesh is None:
        return tuple(Submesh((device,)) for device in devices)
    grid = np.empty(mesh.num_ranks, object)
    grid[:] = devices_for(mesh.num_ranks, devices)
    grid = grid.reshape(tuple(mesh.axes.values()))
    own = np.moveaxis(grid, list(mesh.axes).index(mesh.stage_axis), 0)
    return tuple(
        Submesh(tuple(part.flat), Mesh(part, mesh.other_axes), mesh.auto_axes) for part in own
    )


def entries(x: jax.Array) -> list[jax.Array]:
    """What each device holds of an array whose dim 0 is cut over devices, in order; one where several hold the same."""
    if x.sharding.num_devices == 1:
        return [x]
    found: dict[int, jax.Array] = {}
    for shard in x.addressable_shards:
        found.setdefault(shard.index[0].start or 0, shard.data)
    return [found[start] for start in sorted(found)]
