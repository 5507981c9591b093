"""In which layout the operands of a jaxpr are used, so that a parameter that is only ever used cut is held cut.

A walk from the results back: what uses of a value ask for is one layout, or, where they differ, the whole.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from plait.core_ir.graph import UNKNOWN
from plait.core_ir.mesh import Layout, axes_of
from plait.frontends.jax import lower_elementwise
from plait.frontends.jax.jaxpr import ClosedJaxpr, JaxprEqn, Var, closed, shape_of
from plait.frontends.jax.lower_annotation import CONSTRAINT
from plait.frontends.jax.lower_control import CALLS, IDENTITIES
from plait.frontends.jax.lower_parts import MOVES, SUM, moved_dims
from plait.frontends.jax.mapped import SHARD_MAP, mapped
from plait.frontends.jax.sharded import WHOLE, broadcast_layout, broadcasts, trimmed

Use = Layout | None
"""How a value is used; None: not at all, or in any way in which it comes."""


def used_layouts(jaxpr: ClosedJaxpr, results: Sequence[Use], axes: Collection[str]) -> list[Use]:
    """How each operand is used, by how each result is; layouts over other than these axes count as the whole."""
    uses: dict[Var, Use] = {}

    def use(atom: Any, layout: Use) -> None:
        if isinstance(atom, Var):
            uses[atom] = both(uses.get(atom), layout)

    for atom, layout in zip(jaxpr.jaxpr.outvars, results, strict=True):
        use(atom, layout)
    for eqn in reversed(jaxpr.jaxpr.eqns):
        rule = _RULES.get(eqn.primitive.name, _whole)
        given = [uses.get(v) for v in eqn.outvars]
        for atom, layout in zip(eqn.invars, rule(eqn, given, axes), strict=True):
            use(atom, layout)
    return [uses.get(v) for v in jaxpr.jaxpr.invars]


def both(a: Use, b: Use) -> Use:
    """What two uses ask for together."""
    if a is None or b is None:
        return b if a is None else a
    return a if a == b else WHOLE


_Rule = Callable[[JaxprEqn, Sequence[Use], Collection[str]], Sequence[Use]]
"""How an equation uses its operands, by how its results are used."""


def _whole(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    return [WHOLE] * len(eqn.invars)


def _shard_map(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    layouts = mapped(eqn.params, UNKNOWN).operands
    return [to if set(axes_of(to)) <= set(axes) else WHOLE for to in layouts]


def _elementwise(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    (use,), shape = results, shape_of(eqn.outvars[0])
    return [
        use and broadcast_layout(use, shape_of(v), shape)
        if broadcasts(shape_of(v), shape)
        else WHOLE
        for v in eqn.invars
    ]


def _moved(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    (use,), shape = results, shape_of(eqn.invars[0])
    if use is None:
        return [None]
    layout: list[tuple[str, ...]] = [()] * len(shape)
    for over, dim, size in zip(use, moved_dims(eqn), shape_of(eqn.outvars[0]), strict=False):
        if dim is not None and shape[dim] == size:
            layout[dim] = over
    return [trimmed(layout)]


def _sum(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    return [None]


def _same(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    return results


def _call(param: str) -> _Rule:
    def rule(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
        return used_layouts(closed(eqn.params[param]), results, axes)

    return rule


def _cond(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    uses: list[Use] = [None] * (len(eqn.invars) - 1)
    for branch in eqn.params["branches"]:
        found = used_layouts(branch, results, axes)
        uses = [both(a, b) for a, b in zip(uses, found, strict=True)]
    return [WHOLE, *uses]


def _scan(eqn: JaxprEqn, results: Sequence[Use], axes: Collection[str]) -> Sequence[Use]:
    body, num_consts = closed(eqn.params["jaxpr"]), int(eqn.params["num_consts"])
    first_x = num_consts + int(eqn.params["num_carry"])
    carry = list(results[: first_x - num_consts])
    rows = [_row(stack) for stack in results[first_x - num_consts :]]
    while True:
        uses = used_layouts(body, [*carry, *rows], axes)
        again = [both(a, b) for a, b in zip(carry, uses[num_consts:first_x], strict=True)]
        if again == carry:
            break
        carry = again
    return [*uses[:num_consts], *carry, *(_stack(row) for row in uses[first_x:])]


def _row(stack: Use) -> Use:
    return stack[1:] if stack and not stack[0] else stack and WHOLE


def _stack(row: Use) -> Use:
    return ((), *row) if row else row


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(lower_elementwise.RULES, _elementwise),
    **dict.fromkeys(MOVES, _moved),
    SUM: _sum,
    **dict.fromkeys((*IDENTITIES, CONSTRAINT), _same),
    **{name: _call(param) for name, param in CALLS.items()},
    "remat2": _call("jaxpr"),
    "cond": _cond,
    "scan": _scan,
    SHARD_MAP: _shard_map,
}
