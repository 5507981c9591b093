"""Meshes of devices by the names of their axes, as the user of either framework gives them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from plait.backends.replicas import Replicas
from plait.core_ir.errors import UsageError


def read_mesh(mesh: Any, stage_axis: str) -> dict[str, int] | None:
    """The axes of a mesh, in its order, with their sizes: of a dict, a torch DeviceMesh or a JAX Mesh; None for None.

    UsageError for anything else, for an axis without a name or a size, and for a mesh without the stages' axis.
    """
    if mesh is None:
        if stage_axis != "stage":
            raise UsageError(f"stage_axis={stage_axis!r} names an axis of a mesh; pass mesh= too")
        return None
    axes = _axes(mesh)
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"mesh: the name of an axis must be a string, got {name!r}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UsageError(
                f"mesh: axis {name!r} must have an integer size of at least 1, got {size!r}"
            )
    if stage_axis not in axes:
        raise UsageError(
            f"mesh has the axes {', '.join(axes) or '(none)'}, but no axis {stage_axis!r} for the stages; add it, or "
            "name the axis of the stages with stage_axis="
        )
    return axes


def replicas_of(axes: Mapping[str, int] | None, stage_axis: str) -> Replicas | None:
    """How the ranks of a mesh stand: None where the stages are all there is."""
    if axes is None or all(size == 1 for name, size in axes.items() if name != stage_axis):
        return None
    ranks = np.arange(np.prod(list(axes.values()))).reshape(*axes.values())
    table = np.moveaxis(ranks, list(axes).index(stage_axis), 0).reshape(axes[stage_axis], -1)
    return Replicas(tuple(tuple(int(rank) for rank in row) for row in table))


def _axes(mesh: Any) -> dict[Any, Any]:
    if isinstance(mesh, Mapping):
        return dict(mesh)
    names = getattr(mesh, "mesh_dim_names", None)
    if names is not None:  # a torch DeviceMesh
        return dict(zip(names, tuple(mesh.shape), strict=True))
    names = getattr(mesh, "axis_names", None)
    if names is not None:  # a JAX Mesh
        return {name: int(mesh.shape[name]) for name in names}
    raise UsageError(
        'mesh must be a dict of axis sizes such as {"stage": 2, "data": 2}, a torch DeviceMesh with mesh_dim_names or '
        f"a JAX Mesh, got {type(mesh).__module__}.{type(mesh).__qualname__}"
    )
