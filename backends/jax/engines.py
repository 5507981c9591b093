"""The engines of the JAX backend by name, and the devices they run on."""

from collections.abc import Mapping
from typing import Any

import jax

from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.engine_spmd import SpmdEngine
from plait.backends.replicas import ReplicatedEngine
from plait.backends.runtime import Engine
from plait.core_ir.errors import UsageError
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.program import Program
from plait.core_ir.schedule.schedule import Schedule


def join(engine: str) -> None:
    """There is one process, and nobody to meet."""


def resolve_device(device: Any) -> tuple[jax.Device, ...]:
    """The devices of a platform ("cpu", "gpu", ...), by default of JAX's own; UsageError where there is none."""
    try:
        return tuple(jax.devices(device))
    except RuntimeError as error:
        raise UsageError(f"JAX has no devices of platform {device!r} here: {error}") from None


def device_name(devices: tuple[jax.Device, ...]) -> str | None:
    """What JAX calls the first device, and so all of its platform; None for a CPU."""
    return None if devices[0].platform == "cpu" else devices[0].device_kind


def build(
    program: Program,
    schedule: Schedule,
    *,
    engine: str,
    device: tuple[jax.Device, ...],
    codegen: None,
    mesh: Mesh | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Engine:
    """Compile a program under a schedule, on a mesh with a device for each of its ranks.

    layouts: of parameters and buffers by name, where ranks hold parts of them.

    Replicas that have nothing to tell each other within a step may take turns: they run on any number of devices.
    """
    if mesh is not None and mesh.num_ranks == schedule.num_ranks:
        mesh = None  # all other axes are of one rank
    if engine == "spmd":
        return SpmdEngine(program, schedule, devices=device, mesh=mesh, layouts=layouts)
    alone = mesh is not None and _is_replicas(mesh) and program.shard_axis is None
    if mesh is None or len(device) >= mesh.num_ranks or not alone:
        return MpmdEngine(program, schedule, devices=device, mesh=mesh, layouts=layouts)
    ranks = mesh.groups((mesh.stage_axis,))

    def build_replica(replica: int) -> Engine:
        own = [device[rank % len(device)] for rank in ranks[replica]]
        return MpmdEngine(program, schedule, devices=own, home=device[0])

    return ReplicatedEngine(mesh, program, build_replica)


def _is_replicas(mesh: Mesh) -> bool:
    """Whether ranks that differ on other axes than that of the stages run parts of the batch, and nothing else."""
    return all(
        axis in mesh.data_axes and axis not in mesh.named_axes
        for axis in mesh.other_axes
        if mesh.axes[axis] > 1
    )


def agree(
    engine: str, device: tuple[jax.Device, ...] | None, error: Exception | None, text: str
) -> None:
    """Raise what went wrong in compiling."""
    if error is not None:
        raise error
