"""The table from primitive to lowering rule, and the walk over a jaxpr that applies it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Value
from plait.core_ir.mesh import Layout, part_type
from plait.frontends.jax import (
    lower_annotation,
    lower_collective,
    lower_control,
    lower_elementwise,
    lower_flow,
    lower_index,
    lower_linalg,
    lower_parts,
    lower_random,
    lower_reduce,
    lower_shape,
    lower_shard_map,
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
from plait.frontends.jax.sharded import (
    WHOLE,
    Operand,
    Sharded,
    laid_out,
    layout_of,
    part,
    sharded,
)
from plait.frontends.jax.site import Body, Rule, Site

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
        **lower_flow.RULES,
        **lower_shard_map.RULES,
        **lower_annotation.RULES,
        **lower_traced.RULES,
    }
)
"""A primitive that is not here becomes an `extern`."""

TAKES_PARTS = lower_control.TAKES_PARTS | {
    *lower_flow.RULES,
    *lower_shard_map.RULES,
    *lower_annotation.RULES,
}
"""Primitives whose rules take operands that are sharded as they are; others get the whole."""


KEEP_UNIFORM = frozenset(
    {
        *(
            "add",
            "add_any",
            "broadcast_in_dim",
            "convert_element_type",
            "copy",
            "div",
            "mul",
            "neg",
            "pvary",
        ),
        *("reshape", "squeeze", "sub", "transpose"),
    }
)
"""Primitives that give every rank the same where they read the same."""


@dataclass(frozen=True)
class JaxprLowering:
    """Lowers jaxprs into builders.

    scopes: module scopes of the equation that what is lowered stands in.
    recomputing: what is lowered computes again what the forward computed.
    axes: number of ranks along each axis of the mesh, and along each that a `shard_map` met so far is over.
    stage_axis: the axis along which the stages stand.
    wholes: what has been made of what is sharded.
    fills: of a value whose elements are all one scalar, that scalar.
    uniform: values known to be the same on all ranks: numbers, the cotangent of the loss, and what is made of these.
    annotated: what sharding annotations gave.
    """

    marks: Marks
    scopes: tuple[str, ...] = ()
    recomputing: bool = False
    axes: dict[str, int] = field(default_factory=dict)
    stage_axis: str = ""
    wholes: dict[Sharded, Value] = field(default_factory=dict)
    fills: dict[Value, Value] = field(default_factory=dict)
    uniform: set[Value] = field(default_factory=set)
    annotated: set[Value] = field(default_factory=set)

    def inline(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Operand) -> list[Operand]:
        """The results of a jaxpr, its equations appended to `b`."""
        env: dict[Var, Operand] = {}
        for var, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            literal = b.literal(content_of(constant, type_of_aval(var.aval, b.source)))
            env[var] = literal
            self.uniform.add(literal)
        env.update(zip(jaxpr.jaxpr.invars, operands, strict=True))
        for eqn in jaxpr.jaxpr.eqns:
            results = self._lower(b, eqn, env)
            env.update(zip(eqn.outvars, results, strict=True))
            if eqn.primitive.name == lower_annotation.CONSTRAINT:
                (annotated,) = results
                env.update((v, annotated) for v in eqn.invars if self._is_first(env, v, annotated))
        return [_read(b, env, atom) for atom in jaxpr.jaxpr.outvars]

    def inline_whole(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Value) -> list[Value]:
        """As `inline`; the results are whole."""
        return [self.whole(b, x) for x in self.inline(b, jaxpr, *operands)]

    def recompute(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Operand) -> list[Operand]:
        """As `inline`, for a jaxpr that computes again what the forward computed."""
        return replace(self, recomputing=True).inline(b, jaxpr, *operands)

    def body(
        self,
        name: str,
        jaxpr: ClosedJaxpr,
        given: Sequence[Layout] | None = None,
        wanted: Sequence[Layout] | None = None,
    ) -> Body:
        """A jaxpr as a graph of its own, of parts: operands lie as given, results as wanted (None: all are whole)."""
        b = Builder(name)
        inputs: list[Operand] = []
        for position, var in enumerate(jaxpr.jaxpr.invars):
            type, layout = type_of_aval(var.aval, b.source), given[position] if given else WHOLE
            local = b.input(part_type(type, layout, self.axes))
            inputs.append(sharded(local, layout, type, self.axes))
        results = self.inline(b, jaxpr, *inputs)
        for position, result in enumerate(results):
            b.output(self.laid_out(b, result, wanted[position] if wanted else WHOLE))
        return Body(b.build(), [layout_of(result) for result in results])

    def whole(self, b: Builder, x: Operand) -> Value:
        """The whole of what may be sharded: gathered once."""
        if not isinstance(x, Sharded):
            return x
        if x not in self.wholes:
            self.wholes[x] = self.laid_out(b, x, WHOLE)
        return self.wholes[x]

    def laid_out(self, b: Builder, x: Operand, layout: Layout) -> Value:
        """This rank's part of x by a layout."""
        scalar, now = self.fills.get(part(x)), layout_of(x)
        if scalar is not None and layout != now and (now == WHOLE or scalar in self.uniform):
            # Any part is like any other, over axes that the mesh lacks too.
            value = b.expand(scalar, part_type(x.type, layout, self.axes).shape)
        else:
            value = laid_out(b, x, layout, self.axes)
        if part(x) in self.marks.backward:
            self.marks.backward.add(value)
        return value

    def _is_first(self, env: Mapping[Var, Operand], var: Any, annotated: Operand) -> bool:
        """Whether a value is annotated for the first time. What reads it later then reads what the annotation gave, or
        the backward would keep the one value twice."""
        is_first = isinstance(var, Var) and part(env[var]) not in self.annotated
        self.annotated.add(part(annotated))
        return is_first

    def _lower(self, b: Builder, eqn: JaxprEqn, env: Mapping[Var, Operand]) -> Sequence[Operand]:
        inner = replace(self, scopes=self.scopes + name_scopes(eqn))
        source = source_of(eqn, inner.scopes, b.source)
        types = tuple(type_of_aval(v.aval, source) for v in eqn.outvars)
        site = Site(eqn, eqn.params, types, source, inner, self.recomputing)
        with b.at(source):
            operands = [_read(b, env, atom) for atom in eqn.invars]
            results = self._apply(b, site, operands)
        literals = (x for x, v in zip(operands, eqn.invars, strict=True) if isinstance(v, Literal))
        self.uniform.update(map(part, literals))
        if eqn.primitive.name in KEEP_UNIFORM and self.uniform.issuperset(map(part, operands)):
            self.uniform.update(map(part, results))
        if eqn.primitive.name == "broadcast_in_dim" and not operands[0].type.rank:
            self.fills[part(results[0])] = part(operands[0])
        found = tuple(x.type for x in results)
        if found != types:
            raise CaptureError(
                f"{source}: the lowering of {eqn.primitive.name} gave {found} where JAX says {types}; "
                "this is a bug in Plait, please report the equation"
            )
        if not self.marks.backward.isdisjoint(map(part, operands)):
            self.marks.backward.update(map(part, results))
        return results

    def _apply(self, b: Builder, site: Site, operands: list[Operand]) -> Sequence[Operand]:
        name = site.eqn.primitive.name
        rule = RULES.get(name, extern)
        if name not in TAKES_PARTS and any(isinstance(x, Sharded) for x in operands):
            result = lower_parts.on_parts(b, site, rule, operands)
            if result is not None:
                return [result]
            operands = [self.whole(b, x) for x in operands]
        out = rule(b, site, *operands)
        return [out] if isinstance(out, (Value, Sharded)) else list(out)


def _read(b: Builder, env: Mapping[Var, Operand], atom: Any) -> Operand:
    if isinstance(atom, Literal):
        return b.literal(content_of(atom.val, type_of_aval(atom.aval, b.source)))
    return env[atom]


def lower_jaxpr(
    b: Builder,
    jaxpr: ClosedJaxpr,
    operands: Sequence[Operand],
    marks: Marks,
    axes: Mapping[str, int] = MappingProxyType({}),
    stage_axis: str = "",
    layouts: Sequence[Layout] = (),
) -> list[Value]:
    """Append a whole jaxpr to a builder; its results, this rank's parts by `layouts` (the last ones may be left out).

    marks: collects the stage boundaries met. axes: number of ranks along each mesh axis that collectives may name.
    """
    # Of the operands, what stands behind the loss so far is its cotangent.
    uniform = marks.backward & {part(x) for x in operands}
    lowering = JaxprLowering(marks, axes=dict(axes), stage_axis=stage_axis, uniform=uniform)
    results = lowering.inline(b, jaxpr, *operands)
    wanted = (*layouts, *(WHOLE for _ in results[len(layouts) :]))
    return [
        lowering.laid_out(b, x, to) if to else lowering.whole(b, x)
        for x, to in zip(results, wanted, strict=True)
    ]
