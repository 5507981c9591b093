"""Meshes of devices by the names of their axes, as the user of either framework gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from plait.core_ir.errors import UsageError
from plait.core_ir.mesh import Mesh


def read_mesh(mesh: Any, stage_axis: str, data_axes: Sequence[str] | None) -> Mesh | None:
    """The axes of a mesh, in its order, with their sizes: of a dict, a torch DeviceMesh or a JAX Mesh; None for None.

    data_axes: by default all but that of the stages.

    UsageError for anything else, for an axis without a name or a size, for a mesh without the stages' axis, and for
    data axes that are none of the others.
    """
    if mesh is None:
        given = {
            "stage_axis": stage_axis if stage_axis != "stage" else None,
            "data_axes": data_axes,
        }
        for option, value in given.items():
            if value:
                raise UsageError(f"{option}={value!r} names an axis of a mesh; pass mesh= too")
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
    others = [axis for axis in axes if axis != stage_axis]
    if data_axes is None:
        return Mesh(axes, stage_axis, tuple(others))
    if isinstance(data_axes, str) or not isinstance(data_axes, Sequence):
        raise UsageError(f"data_axes must be a sequence of names of axes, got {data_axes!r}")
    for axis in data_axes:
        if axis not in others:
            raise UsageError(
                f"data_axes names {axis!r}; beside the stages' the mesh has the axes "
                f"{', '.join(map(repr, others)) or '(none)'}"
            )
    return Mesh(axes, stage_axis, tuple(axis for axis in others if axis in data_axes))


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
