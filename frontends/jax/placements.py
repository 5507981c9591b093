"""How parameters lie over axes that are left to XLA: as their arrays do, else as the metadata of nnx or linen says."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import flax.linen as nn
from flax import nnx
from jax.sharding import NamedSharding

from plait.core_ir.errors import UsageError
from plait.core_ir.graph import Graph
from plait.core_ir.mesh import Layout, Mesh, axes_of, part_type
from plait.core_ir.passes.equations import collective_axes
from plait.frontends.captured import Leaf
from plait.frontends.jax.lower_annotation import spec_layout
from plait.frontends.jax.mesh_axes import check_axis
from plait.frontends.jax.model import ModelView
from plait.frontends.jax.sharded import trimmed
from plait.frontends.jax.trees import named_leaves


def placed(
    leaves: Sequence[Leaf], view: ModelView, mesh: Mesh, graph: Graph, left: Mapping[str, str]
) -> tuple[tuple[Leaf, ...], dict[str, str]]:
    """The leaves, parameters with their placements; and the axes that these name, with the parameter that does, next to
    those that are `left` to the compiler, with what says so.

    An array may lie over any axes, those of another mesh too: only those count that this one has beside that of the
    stages, and that nothing is mapped over. Shards of our own, too, are held so: their axis does not count either.
    CaptureError for metadata that names an axis which the mesh lacks, UsageError where an axis does not divide its dim.
    """
    mapped = {*collective_axes(graph)}.union(*(axes_of(leaf.layout) for leaf in leaves))
    ours = {*mapped, mesh.shard_axis}
    free = {axis for axis in mesh.other_axes if axis not in ours and mesh.axes[axis] > 1}
    found = {**_by_metadata(view, mesh), **_by_arrays(view)}
    result, axes = [], {axis: where for axis, where in left.items() if axis in free}
    for leaf in leaves:
        placement = found.get(leaf.name, ()) if leaf.role == "param" else ()
        placement = trimmed(tuple(axis for axis in over if axis in free) for over in placement)
        try:
            part_type(leaf.type, placement, mesh.axes)
        except UsageError as error:
            raise UsageError(f"parameter {leaf.name!r}: {error}") from None
        for axis in axes_of(placement):
            axes.setdefault(axis, f"how parameter {leaf.name!r} lies")
        result.append(replace(leaf, placement=placement))
    return tuple(result), axes


def _by_arrays(view: ModelView) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    arrays, _ = named_leaves(view.read()[0], view.params.root)
    for name, array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and any(sharding.spec):
            found[name] = spec_layout(sharding.spec, sharding.mesh.shape)
    return found


def _by_metadata(view: ModelView, mesh: Mesh) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    boxes, _ = named_leaves(view.read()[0], view.params.root, _is_box)
    for name, box in boxes:
        if not _is_box(box):
            continue
        spec = nnx.get_partition_spec(box).get_value() if isinstance(box, nnx.Variable) else None
        if isinstance(box, nn.Partitioned):
            spec = box.get_partition_spec()
        layout = tuple(
            () if over is None else over if isinstance(over, tuple) else (over,)
            for over in spec or ()
        )
        for axis in axes_of(layout):
            check_axis(
                axis, mesh, f"the metadata of parameter {name!r} says that it lies over axis"
            )
        found[name] = layout
    return found


def _is_box(node: Any) -> bool:
    return isinstance(node, (nnx.Variable, nn.Partitioned))
