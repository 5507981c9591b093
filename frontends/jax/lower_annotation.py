"""Lowering rules of sharding annotations: what JAX leaves to XLA's partitioning is left to it here too.

An annotation does not change its value. It stays in the program as `extern {target="jax:sharding_constraint"}`, whose
spec is `{"layout": [["tensor"], [], null]}`: for each dim the axes that cut it, null where the user left that open.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.mesh import Layout
from plait.core_ir.ops import control
from plait.core_ir.passes.equations import nested_graphs
from plait.frontends.jax.sharded import Operand, like, part
from plait.frontends.jax.site import Rule, Site

CONSTRAINT = "sharding_constraint"
TARGET = f"jax:{CONSTRAINT}"


def annotations(graph: Graph) -> Iterator[tuple[Eqn, tuple[str, ...]]]:
    """The annotations of a program, those in bodies too, with the axes that each names."""
    for eqn in graph.eqns:
        for nested in nested_graphs(eqn):
            yield from annotations(nested)
        if eqn.op is control.extern and eqn.attrs["target"] == TARGET:
            layout = json.loads(eqn.attrs["spec"])["layout"]
            yield eqn, tuple(axis for over in layout for axis in over or ())


def spec_layout(spec: Any, sizes: Mapping[Any, int]) -> Layout:
    """The axes of several ranks that cut each dim, as a PartitionSpec says; none where it leaves a dim open."""
    layout = []
    for over in spec:
        axes = over if isinstance(over, tuple) else (over,)
        layout.append(tuple(axis for axis in axes if sizes.get(axis, 1) > 1))
    return tuple(layout)


def annotated(b: Builder, site: Site, x: Operand, sharding: Any) -> Operand:
    """x with the user's word on how it lies. Parts are annotated as wholes are: axes that cut a value already are not
    XLA's to lay it over."""
    if not isinstance(sharding, NamedSharding):
        raise CaptureError(
            f"{site.source}: a sharding annotation by a {type(sharding).__name__} is not captured; give a "
            "NamedSharding, or a PartitionSpec under jax.set_mesh"
        )
    known, sizes = site.lowering.axes, sharding.mesh.shape
    axes = spec_layout(sharding.spec, sizes)
    for axis in (axis for over in axes for axis in over):
        if known.get(axis, sizes[axis]) != sizes[axis]:
            raise CaptureError(
                f"{site.source}: a sharding annotation for a mesh with {sizes[axis]} ranks along axis {axis!r}; "
                f"elsewhere there are {known[axis]}; give mesh= and the model's meshes the same sizes"
            )
    layout = [
        None if over is PartitionSpec.UNCONSTRAINED else list(names)
        for over, names in zip(sharding.spec, axes, strict=True)
    ]
    if not known and not any(layout):
        return x  # whole, on the one device of its stage
    local = part(x)
    spec = json.dumps({"layout": layout})
    (marked,) = b.emit(control.extern, local, target=TARGET, results=(local.type,), spec=spec)
    return like(x, marked)


def _constraint(b: Builder, site: Site, x: Operand) -> Operand:
    return annotated(b, site, x, site.params["sharding"])


RULES: Mapping[str, Rule] = MappingProxyType({CONSTRAINT: _constraint})
