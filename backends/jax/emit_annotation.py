"""The emitter of a sharding annotation: XLA is told how a value lies over axes that are left to it."""

import json
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

from plait.backends.jax.private import constrain
from plait.core_ir.graph import Eqn

ANNOTATION = "jax:sharding_constraint"
"""The target of the `extern`. Its spec is {"layout": the axes that cut each dim, or null where that is left open}."""


def annotated(eqn: Eqn, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operand, annotated for the mesh in context; as it is where that leaves no axis to XLA."""
    (x,) = operands
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = {axis for axis, type in types.items() if type is AxisType.Auto}
    if not auto:
        return (x,)
    layout = json.loads(eqn.attrs["spec"])["layout"]
    dims = [
        PartitionSpec.UNCONSTRAINED if over is None else tuple(a for a in over if a in auto) or None
        for over in layout
    ]
    return (constrain(x, dims),)
