"""What a captured program says of the mesh that it is to run on."""

from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Graph
from plait.core_ir.mesh import Mesh
from plait.core_ir.passes.equations import nested_graphs


def check_axes(graph: Graph, mesh: Mesh | None) -> None:
    """CaptureError where ranks cannot do what an equation asks for: they have no such axis, or stages lie along it."""
    for eqn in graph.eqns:
        for nested in nested_graphs(eqn):
            check_axes(nested, mesh)
        if eqn.op.evaluate_ranks is None or eqn.attrs["size"] == 1:
            continue
        axis, size = eqn.attrs["axis"], eqn.attrs["size"]
        cuts = f"{eqn.source}: the model cuts values, or communicates ({eqn.op.name}), over axis {axis!r}"
        if mesh is None:
            raise CaptureError(
                f"{cuts} of a mesh; pass the mesh to compile for, mesh={{..., {axis!r}: {size}}}"
            )
        if axis == mesh.stage_axis:
            raise CaptureError(
                f"{cuts}, along which the stages stand: what lies along it is the schedule's to say; name another axis"
            )
        if axis not in mesh.axes:
            others = ", ".join(map(repr, mesh.other_axes)) or "no axes"
            raise CaptureError(
                f"{cuts}, which the mesh does not have; beside that of the stages it has {others}"
            )
