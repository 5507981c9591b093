"""What a captured program says of the mesh that it is to run on."""

from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Graph
from plait.core_ir.mesh import Mesh
from plait.core_ir.passes.equations import collective_axes, nested_graphs
from plait.frontends.jax.lower_annotation import annotations


def check_axes(graph: Graph, mesh: Mesh | None) -> None:
    """CaptureError where ranks cannot do what an equation asks for: they have no such axis, or stages lie along it."""
    for eqn in graph.eqns:
        for nested in nested_graphs(eqn):
            check_axes(nested, mesh)
        if eqn.op.evaluate_ranks is None or eqn.attrs["size"] == 1:
            continue
        axis, size = eqn.attrs["axis"], eqn.attrs["size"]
        cuts = f"{eqn.source}: the model cuts values, or communicates ({eqn.op.name}), over axis"
        check_axis(axis, mesh, cuts, str(size))


def check_axis(axis: str, mesh: Mesh | None, cuts: str, size: str = "...") -> None:
    """CaptureError where the mesh has no such axis beside that of the stages. `cuts` says where which value lies."""
    if mesh is None:
        raise CaptureError(
            f"{cuts} {axis!r} of a mesh; pass the mesh to compile for, mesh={{..., {axis!r}: {size}}}"
        )
    if axis == mesh.stage_axis:
        raise CaptureError(
            f"{cuts} {axis!r}, along which the stages stand: what lies along it is the schedule's to say; name another "
            "axis"
        )
    if axis not in mesh.axes:
        others = ", ".join(map(repr, mesh.other_axes)) or "no axes"
        raise CaptureError(
            f"{cuts} {axis!r}, which the mesh does not have; beside that of the stages it has {others}"
        )


def annotated_axes(graph: Graph, mesh: Mesh | None) -> dict[str, str]:
    """The axes that sharding annotations name, with the line of the first that does.

    CaptureError for one that the mesh lacks, that of the stages, and one that a `shard_map` is over too.
    """
    found: dict[str, str] = {}
    mapped = collective_axes(graph)
    for eqn, axes in annotations(graph):
        for axis in axes:
            says = f"{eqn.source}: a sharding annotation over axis"
            check_axis(axis, mesh, says)
            if axis in mapped:
                raise CaptureError(
                    f"{says} {axis!r}, over which the model's shard_map runs: along one axis a model is either "
                    "mapped by hand or left to XLA; drop the annotation, or name another axis"
                )
            found.setdefault(axis, f"{eqn.source}: a sharding annotation")
    return found
