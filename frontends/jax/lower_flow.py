"""Lowering rules: `scan` and `cond`, kept; their graphs are of parts, where what they read or give is sharded."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Value
from plait.core_ir.mesh import Layout
from plait.core_ir.ops import control as ops
from plait.frontends.jax.jaxpr import ClosedJaxpr, closed
from plait.frontends.jax.lower_unroll import unroll_scan
from plait.frontends.jax.sharded import WHOLE, Operand, layout_of, part, sharded
from plait.frontends.jax.site import Body, Rule, Site


def refuse_cut(site: Site, *bodies: object) -> None:
    """CaptureError where a stage boundary stands inside what runs in one stage."""
    if any(site.lowering.marks.inside(body) for body in bodies):  # type: ignore[arg-type]
        raise CaptureError(
            f"{site.source}: a stage boundary stands inside a {site.eqn.primitive.name}, which runs in one stage; "
            "move it out, or use jax.lax.scan, which is unrolled where a boundary cuts it"
        )


def _cond(b: Builder, site: Site, index: Operand, *operands: Operand) -> Sequence[Operand]:
    branches = site.params["branches"]
    if site.params.get("branches_platforms"):
        return _default_branch(b, site, *operands)
    refuse_cut(site, *branches)
    given = [layout_of(x) for x in operands]

    def bodies(wanted: Sequence[Layout] | None) -> list[Body]:
        return [
            site.lowering.body(f"branch{i}", branch, given, wanted)
            for i, branch in enumerate(branches)
        ]

    lowered = bodies(None)
    layouts = [_agreed(found) for found in zip(*(body.found for body in lowered), strict=True)]
    if any(layouts):
        lowered = bodies(layouts)
    graphs = tuple(body.graph for body in lowered)
    which = site.lowering.whole(b, index)
    results = b.emit(ops.cond, which, *map(part, operands), branches=graphs)
    return _laid(site, results, layouts)


def _agreed(found: Sequence[Layout]) -> Layout:
    """The one layout in which branches give a result, but for those that give the whole."""
    layouts = {layout for layout in found if layout != WHOLE}
    return layouts.pop() if len(layouts) == 1 else WHOLE


def _default_branch(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    """A branch for each platform: a program runs on any, so the one that serves them all."""
    platforms = site.params["branches_platforms"]
    if None not in platforms:
        raise CaptureError(
            f"{site.source}: lax.platform_dependent without a default has branches for {platforms} only, and Plait "
            "compiles for any platform; add default=..."
        )
    branch = site.params["branches"][platforms.index(None)]
    return site.lowering.inline(b, branch, *operands)


def _scan(b: Builder, site: Site, *operands: Operand) -> Sequence[Operand]:
    p, lowering = site.params, site.lowering
    num_consts, num_carry, body = int(p["num_consts"]), int(p["num_carry"]), closed(p["jaxpr"])
    first_x = num_consts + num_carry
    consts, carry = operands[:num_consts], operands[num_consts:first_x]
    # A stack that is cut along its first dim has no rows that lie on one rank.
    xs = [
        lowering.whole(b, x) if layout_of(x)[:1] not in ((), ((),)) else x
        for x in operands[first_x:]
    ]
    if lowering.marks.inside(body):
        return unroll_scan(b, site, body, consts, carry, xs)
    lowered, layouts = _settled(site, body, consts, carry, xs)
    carried = [
        lowering.laid_out(b, x, to) for x, to in zip(carry, layouts[:num_carry], strict=True)
    ]
    results = b.emit(
        ops.scan,
        *map(part, consts),
        *carried,
        *map(part, xs),
        body=lowered.graph,
        num_consts=num_consts,
        num_carry=num_carry,
        length=int(p["length"]),
        reverse=bool(p["reverse"]),
    )
    stacks = [((), *row) if row else WHOLE for row in layouts[num_carry:]]
    return _laid(site, results, [*layouts[:num_carry], *stacks])


def _settled(
    site: Site,
    jaxpr: ClosedJaxpr,
    consts: Sequence[Operand],
    carry: Sequence[Operand],
    xs: Sequence[Operand],
) -> tuple[Body, list[Layout]]:
    """The body of a scan, and how its carry and its rows lie.

    A carry lies as the body gives it, if the body does so whenever it gets it so; else it is whole.
    """
    before, rows = [layout_of(x) for x in consts], [layout_of(x)[1:] for x in xs]
    num_carry = len(carry)
    wanted = [layout_of(x) for x in carry]
    wanted += [WHOLE for _ in jaxpr.jaxpr.outvars[num_carry:]]
    whole: set[int] = set()
    while True:
        lowered = site.lowering.body("body", jaxpr, [*before, *wanted[:num_carry], *rows], wanted)
        found = list(lowered.found)
        for i in range(num_carry):
            if i in whole or (wanted[i] != WHOLE and found[i] != wanted[i]):
                whole.add(i)
                found[i] = WHOLE
        if found == wanted:
            return lowered, wanted
        wanted = found


def _laid(site: Site, values: Sequence[Value], layouts: Sequence[Layout]) -> list[Operand]:
    return [
        sharded(value, layout, type, site.lowering.axes)
        for value, layout, type in zip(values, layouts, site.results, strict=True)
    ]


RULES: Mapping[str, Rule] = MappingProxyType({"cond": _cond, "scan": _scan})
