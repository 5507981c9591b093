"""The table from primitive to lowering rule, and the walk over a jaxpr that applies it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Graph, Value
from plait.frontends.jax import (
    lower_collective,
    lower_control,
    lower_elementwise,
    lower_index,
    lower_linalg,
    lower_random,
    lower_reduce,
    lower_shape,
    lower_traced,
)
from plait.frontends.jax.jaxpr import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    content_of,
    name_scopes,
    source_of,
    type_of_aval,
)
from plait.frontends.jax.lower_extern import extern
from plait.frontends.jax.marks import Marks
from plait.frontends.jax.site import Rule, Site

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **lower_elementwise.RULES,
        **lower_shape.RULES,
        **lower_reduce.RULES,
        **lower_index.RULES,
        **lower_linalg.RULES,
        **lower_random.RULES,
        **lower_collective.RULES,
        **lower_control.RULES,
        **lower_traced.RULES,
    }
)
"""A primitive that is not here becomes an `extern`."""


@dataclass(frozen=True)
class JaxprLowering:
    """Lowers jaxprs into builders.

    scopes: module scopes of the equation that what is lowered stands in.
    recomputing: what is lowered computes again what the forward computed.
    axes: number of ranks along each axis of the mesh.
    """

    marks: Marks
    scopes: tuple[str, ...] = ()
    recomputing: bool = False
    axes: Mapping[str, int] = field(default_factory=dict)

    def inline(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Value) -> list[Value]:
        """The results of a jaxpr, its equations appended to `b`."""
        env: dict[Var, Value] = {}
        for var, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = b.literal(content_of(constant, type_of_aval(var.aval, b.source)))
        env.update(zip(jaxpr.jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.jaxpr.eqns:
            env.update(zip(eqn.outvars, self._lower(b, eqn, env), strict=True))
        return [_read(b, env, atom) for atom in jaxpr.jaxpr.outvars]

    def recompute(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Value) -> list[Value]:
        """As `inline`, for a jaxpr that computes again what the forward computed."""
        return replace(self, recomputing=True).inline(b, jaxpr, *operands)

    def body(self, name: str, jaxpr: ClosedJaxpr) -> Graph:
        """A jaxpr as a graph of its own."""
        b = Builder(name)
        inputs = [b.input(type_of_aval(v.aval, b.source)) for v in jaxpr.jaxpr.invars]
        for value in self.inline(b, jaxpr, *inputs):
            b.output(value)
        return b.build()

    def _lower(self, b: Builder, eqn: JaxprEqn, env: Mapping[Var, Value]) -> Sequence[Value]:
        inner = replace(self, scopes=self.scopes + name_scopes(eqn))
        source = source_of(eqn, inner.scopes, b.source)
        types = tuple(type_of_aval(v.aval, source) for v in eqn.outvars)
        site = Site(eqn, eqn.params, types, source, inner, self.recomputing)
        with b.at(source):
            operands = [_read(b, env, atom) for atom in eqn.invars]
            out = RULES.get(eqn.primitive.name, extern)(b, site, *operands)
        results = (out,) if isinstance(out, Value) else tuple(out)
        found = tuple(v.type for v in results)
        if found != types:
            raise CaptureError(
                f"{source}: the lowering of {eqn.primitive.name} gave {found} where JAX says {types}; "
                "this is a bug in Plait, please report the equation"
            )
        if not self.marks.backward.isdisjoint(operands):
            self.marks.backward.update(results)
        return results


def _read(b: Builder, env: Mapping[Var, Value], atom: Any) -> Value:
    if isinstance(atom, Literal):
        return b.literal(content_of(atom.val, type_of_aval(atom.aval, b.source)))
    return env[atom]


def lower_jaxpr(
    b: Builder,
    jaxpr: ClosedJaxpr,
    operands: Sequence[Value],
    marks: Marks,
    axes: Mapping[str, int] = MappingProxyType({}),
) -> list[Value]:
    """Append a whole jaxpr to a builder; its results.

    marks: collects the stage boundaries met. axes: number of ranks along each mesh axis that collectives may name.
    """
    return JaxprLowering(marks, axes=axes).inline(b, jaxpr, *operands)
