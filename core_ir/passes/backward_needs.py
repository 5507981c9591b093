"""How each stage's backward gets the forward values it reads: kept, computed again, or sent.

Computed again are views (of something at hand, or of something no larger) and what depends on parameters and constants
alone; all else that a stage's forward has is kept. A value of an earlier stage is sent forward, to that stage's
forward; a value of a later stage is sent back, from backward to backward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.backward_stages import BackwardStages
from plait.core_ir.passes.forward_stages import ForwardStages, members
from plait.core_ir.passes.free_values import BATCH
from plait.core_ir.passes.joint import Joint
from plait.core_ir.passes.recompute import is_view, price


@dataclass
class BackwardNeeds:
    """redone: equations of the forward that each stage's backward computes again. sent_back: forward values that a
    backward sends to a backward: value, source, target."""

    redone: dict[int, list[Eqn]] = field(default_factory=dict)
    sent_back: list[tuple[Value, int, int]] = field(default_factory=list)


def find_backward_needs(
    joint: Joint, forward: ForwardStages, backward: BackwardStages
) -> BackwardNeeds:
    """Fill in what each backward computes again; `forward.used` and `backward.used` grow by what is sent."""
    needs = BackwardNeeds(redone={stage: [] for stage in range(joint.num_stages)})
    used = backward.used
    producers = {r: eqn for eqn in joint.forward for r in eqn.results}
    for eqn in reversed(joint.forward):
        for stage in members(_readers(eqn, used)):
            if _is_redone(eqn, stage, forward, used, producers):
                needs.redone[stage].append(eqn)
                for operand in eqn.operands:
                    used[operand] = used.get(operand, 0) | 1 << stage
                continue
            for result in eqn.results:
                if used.get(result, 0) >> stage & 1 and not _has(forward, result, stage):
                    _send(result, stage, forward, used, needs)
    for value in joint.inputs:
        if value in forward.defined:
            for stage in members(used.get(value, 0)):
                if not _has(forward, value, stage):
                    _send(value, stage, forward, used, needs)
    for redone in needs.redone.values():
        redone.reverse()
    return needs


def _readers(eqn: Eqn, used: dict[Value, int]) -> int:
    readers = 0
    for result in eqn.results:
        readers |= used.get(result, 0)
    return readers


def _has(forward: ForwardStages, value: Value, stage: int) -> bool:
    return bool((forward.defined.get(value, 0) | forward.used.get(value, 0)) >> stage & 1)


def _is_redone(
    eqn: Eqn,
    stage: int,
    forward: ForwardStages,
    used: Mapping[Value, int],
    producers: Mapping[Value, Eqn],
) -> bool:
    if eqn.op is boundary:
        return False
    is_here = bool(forward.placed[eqn] >> stage & 1)
    if eqn in forward.free.copies and not (is_here and forward.free.flags[eqn.results[0]] & BATCH):
        return True
    if not is_here or not is_view(eqn):
        return False

    def at_hand(value: Value) -> bool:
        is_runtime_input = value not in producers and value not in forward.defined
        return is_runtime_input or bool(used.get(value, 0) >> stage & 1)

    bytes_below = sum(price(o, producers, at_hand) for o in eqn.operands)
    return bytes_below <= eqn.result.type.num_bytes


def _send(
    value: Value, stage: int, forward: ForwardStages, used: dict[Value, int], needs: BackwardNeeds
) -> None:
    home = forward.home(value)
    if home < stage:
        forward.used[value] = forward.used.get(value, 0) | 1 << stage
    else:
        used[value] = used.get(value, 0) | 1 << home
        needs.sent_back.append((value, home, stage))
