"""The values that cross between stages: what becomes the edges of a program."""

from collections.abc import Iterator
from dataclasses import dataclass

from plait.core_ir.graph import Value
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.backward_needs import BackwardNeeds
from plait.core_ir.passes.backward_stages import BackwardStages
from plait.core_ir.passes.forward_stages import ForwardStages, members
from plait.core_ir.passes.joint import Joint
from plait.core_ir.program import EdgeKind


@dataclass(frozen=True)
class Crossing:
    """`sent` in stage `source` becomes `received` in stage `target`; `marked`: at a marker, else directly."""

    sent: Value
    source: int
    received: Value
    target: int
    kind: EdgeKind
    marked: bool


def find_crossings(
    joint: Joint, forward: ForwardStages, backward: BackwardStages, needs: BackwardNeeds
) -> list[Crossing]:
    """All crossings, in the order in which the joint program defines what is sent; activations first."""
    return [
        *_forward_crossings(joint, forward),
        *_backward_crossings(joint, backward),
        *(
            Crossing(v, source, v, target, "gradient", False)
            for v, source, target in needs.sent_back
        ),
    ]


def _forward_crossings(joint: Joint, forward: ForwardStages) -> Iterator[Crossing]:
    def direct(value: Value) -> Iterator[Crossing]:
        defined = forward.defined.get(value, 0)
        if defined:
            for target in members(forward.used.get(value, 0) & ~defined):
                yield Crossing(value, forward.home(value), value, target, "activation", False)

    for value in joint.inputs:
        yield from direct(value)
    for eqn in joint.forward:
        if eqn.op is boundary:
            (operand,), index = eqn.operands, eqn.attrs["index"]
            at_cut = operand not in forward.defined or forward.defined[operand] >> index & 1
            source = index if at_cut else forward.home(operand)
            yield Crossing(operand, source, eqn.result, index + 1, "activation", True)
        for result in eqn.results:
            yield from direct(result)


def _backward_crossings(joint: Joint, backward: BackwardStages) -> Iterator[Crossing]:
    for eqn in backward.eqns:
        if eqn.op is boundary:
            (operand,) = eqn.operands
            source, target = backward.home[operand], eqn.attrs["index"]
            yield Crossing(operand, source, eqn.result, target, "gradient", True)
        here = backward.placed.get(eqn, 0)
        for result in eqn.results:
            at = here or 1 << backward.home[result]
            for target in members(backward.used.get(result, 0) & ~at):
                yield Crossing(result, backward.home[result], result, target, "gradient", False)
