"""The stage that gives each parameter gradient; sums over several stages are taken apart into one part a stage.

%e: f32[8, 4] = transpose(%c)     stage 2     param_grad of stage 2: %e
%d: f32[8, 4] = scatter(%z, ...)  stage 0 ->  param_grad of stage 0: %d
%g: f32[8, 4] = add(%e, %d)
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from plait.core_ir.graph import Eqn, Port, Value
from plait.core_ir.ops.elementwise import add, convert, neg
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.ops.shape import reshape, transpose
from plait.core_ir.passes.availability import Availability
from plait.core_ir.passes.backward_stages import BackwardStages
from plait.core_ir.passes.forward_stages import last

_LINEAR = (transpose, reshape, convert, reduce_sum, neg)
"""Ops of one operand through which a sum may be taken apart."""


def give_gradients(
    gradients: Sequence[tuple[Port, Value]],
    users: Mapping[str, int],
    available: Availability,
    stages: BackwardStages,
) -> None:
    """Fill `stages.outputs`, replacing sums over several stages by one part for each.

    `users` says which stages' forwards read each parameter; a part is given by the highest of them that is not above
    the stage that computes it.
    """
    producers = {r: eqn for eqn in stages.eqns for r in eqn.results}
    num_uses = Counter(o for eqn in stages.eqns for o in eqn.operands)
    num_uses.update(value for _, value in gradients)

    def giver(value: Value, name: str) -> int:
        owners = users.get(name, 0)
        if value not in stages.home:
            return available.pick([value], available.num_stages - 1, owners)
        not_above = owners & ((2 << stages.home[value]) - 1)
        return last(not_above) if not_above else stages.home[value]

    replaced: dict[Eqn, list[Eqn]] = {}
    for port, value in gradients:
        terms, tree = _sum_tree(value, producers, num_uses)
        givers = {term: giver(term, port.name) for term in terms}
        if len(set(givers.values())) < 2:
            stages.outputs.append((port, value, giver(value, port.name)))
            continue
        parts = {term: {stage: term} for term, stage in givers.items()}
        for eqn in tree:
            replaced[eqn] = _take_apart(eqn, parts, stages)
        stages.outputs.extend((port, part, s) for s, part in sorted(parts[value].items()))
    stages.eqns = [new for eqn in stages.eqns for new in replaced.get(eqn, (eqn,))]


def _sum_tree(
    value: Value, producers: Mapping[Value, Eqn], num_uses: Mapping[Value, int]
) -> tuple[list[Value], list[Eqn]]:
    """The terms of a sum, and its additions and linear equations, operands first."""
    terms: list[Value] = []
    tree: list[Eqn] = []
    pending = [value]
    while pending:
        value = pending.pop()
        eqn = producers.get(value)
        if eqn is not None and num_uses[value] == 1 and (eqn.op is add or eqn.op in _LINEAR):
            tree.append(eqn)
            pending.extend(eqn.operands)
        else:
            terms.append(value)
    return terms, tree[::-1]


def _take_apart(
    eqn: Eqn, parts: dict[Value, dict[int, Value]], stages: BackwardStages
) -> list[Eqn]:
    """One equation for each stage that has parts of the operands; `parts` of its result."""
    operands = [parts[o] for o in eqn.operands]
    where = sorted(set().union(*operands))
    stages.late_sums.discard(eqn)
    if len(where) == 1 and all(parts[o] == {where[0]: o} for o in eqn.operands):
        stages.place(eqn, where[0])
        parts[eqn.result] = {where[0]: eqn.result}
        return [eqn]
    made: list[Eqn] = []
    parts[eqn.result] = {}
    for stage in where:
        here = [p[stage] for p in operands if stage in p]
        if eqn.op is add and len(here) == 1:
            parts[eqn.result][stage] = here[0]
            continue
        result = Value(eqn.result.type, eqn.result.name)
        part = Eqn(eqn.op, tuple(here), eqn.attrs, (result,), eqn.source)
        stages.place(part, stage)
        parts[eqn.result][stage] = result
        made.append(part)
    return made
