"""What a `shard_map` equation says. The names of its parameters are those of jax 0.10.2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Source
from plait.core_ir.mesh import Layout
from plait.frontends.jax.jaxpr import ClosedJaxpr, closed
from plait.frontends.jax.sharded import normal

SHARD_MAP = "shard_map"


@dataclass(frozen=True)
class Mapped:
    """A function on parts: what it is given and what it gives, by layout, and how many ranks there are along each axis.

    auto: axes of more than one rank that the function is not mapped over.
    """

    body: ClosedJaxpr
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    axes: Mapping[str, int]
    auto: tuple[str, ...]


def mapped(params: Mapping[str, Any], source: Source) -> Mapped:
    """What the parameters of an equation say. CaptureError for what has no counterpart."""
    mesh = params["mesh"]
    axes = {axis: int(size) for axis, size in mesh.shape.items()}
    manual = {*params["newly_manual_axes"], *mesh.manual_axes}
    for axis in axes:
        if not isinstance(axis, str):
            raise CaptureError(f"{source}: shard_map over axis {axis!r}; name axes by strings")

    def layouts(specs: Any) -> tuple[Layout, ...]:
        return tuple(normal(_layout(spec, source), axes) for spec in specs)

    return Mapped(
        closed(params["jaxpr"]),
        layouts(params["in_specs"]),
        layouts(params["out_specs"]),
        axes,
        tuple(axis for axis, size in axes.items() if size > 1 and axis not in manual),
    )


def _layout(spec: Any, source: Source) -> Layout:
    if not isinstance(spec, PartitionSpec) or spec.unreduced or spec.reduced:
        raise CaptureError(
            f"{source}: shard_map with the spec {spec} is not captured; give a PartitionSpec of axes, one for each dim"
        )
    layout = []
    for over in spec:
        if over is PartitionSpec.UNCONSTRAINED:
            raise CaptureError(f"{source}: shard_map with an unconstrained dim in {spec}")
        layout.append(() if over is None else over if isinstance(over, tuple) else (over,))
    return tuple(layout)
