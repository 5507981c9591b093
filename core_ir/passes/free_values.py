"""The values of a forward that no marker dominates, and which of them are copied rather than sent.

A free equation is copied into each stage that uses it when computing it again costs less than a message with its
results. Copies never depend on both parameters and the batch (as the body of stage 0 does), nor on state. A marker
over a copy, or over a parameter or a batch leaf itself, does not cut, since each stage has the value anyway; but what
reads it there, and is no copy, stands behind it.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from plait.core_ir.cost import eqn_flops
from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.equations import has_effect
from plait.core_ir.passes.joint import Joint

COPY_FLOPS_PER_BYTE = 256
"""A copy is computed, not sent, up to this cost: random bits (60 flops a byte) are, a matrix product is not."""

PARAM_SHRINKAGE = 4
"""A conversion of parameters is copied; a sum over them, that much smaller, is sent."""

PARAM, BATCH, STATE = 1, 2, 4
_FLAGS = {"param": PARAM, "batch": BATCH, "rng_key": BATCH}


@dataclass
class FreeValues:
    """flags: PARAM, BATCH and STATE (a buffer that changes), as each free value depends on them.
    copies: the free equations, and their results, that may be computed anywhere.
    floors: the first stage that may compute an equation, by the markers over copies that its operands passed."""

    flags: dict[Value, int] = field(default_factory=dict)
    floors: dict[Eqn, int] = field(default_factory=dict)
    copies: set[Eqn | Value] = field(default_factory=set)

    def is_constant(self, value: Value) -> bool:
        """Whether a value may be computed anywhere from nothing that is different at each step."""
        return value in self.copies and not self.flags[value]


def is_cheap(eqn: Eqn) -> bool:
    """Whether computing an equation once more costs less than a message with its results."""
    budget = COPY_FLOPS_PER_BYTE * sum(r.type.num_bytes for r in eqn.results)
    return eqn_flops(eqn) <= budget and not has_effect(eqn)


def changing_buffers(joint: Joint) -> dict[Value, Value]:
    """The update of each buffer that the forward changes, by the buffer as it was."""
    updates = {port.name: value for port, value in joint.outputs_of("buffer_update")}
    return {
        value: updates[port.name]
        for value, port in joint.inputs.items()
        if port.role == "buffer" and updates.get(port.name, value) is not value
    }


def find_free_values(joint: Joint) -> tuple[Joint, FreeValues]:
    """The free values, and the joint program without the markers that do not cut."""
    found = FreeValues()
    state = changing_buffers(joint)
    for value, port in joint.inputs.items():
        found.flags[value] = STATE if value in state else _FLAGS.get(port.role, 0)
    same: dict[Value, Value] = {}
    floor: dict[Value, int] = {}
    forward: list[Eqn] = []
    passed_params: Counter[tuple[int, object]] = Counter()
    for original in joint.forward:
        eqn = original.with_operands([same.get(o, o) for o in original.operands])
        lowest = max((floor.get(o, 0) for o in original.operands), default=0)
        if eqn.op is boundary:
            (value,) = eqn.operands
            if value in found.copies or (value in joint.inputs and value not in state):
                same[eqn.result] = value
                floor[eqn.result] = max(lowest, eqn.attrs["index"] + 1)
                passed_params[eqn.attrs["index"], value.type] += found.flags[value] == PARAM
                continue
        else:
            floor.update(dict.fromkeys(eqn.results, lowest))
            if all(o in found.flags for o in eqn.operands):
                _take_in(eqn, lowest, joint, found)
            found.floors[eqn] = lowest if eqn not in found.copies else 0
        forward.append(eqn)

    backward: list[Eqn] = []
    leads_to = only_param(joint)
    for original in joint.backward:
        eqn = original.with_operands([same.get(o, o) for o in original.operands])
        if eqn.op is boundary and leads_to[original]:
            passed = eqn.attrs["index"], eqn.result.type
            if passed_params[passed] > 0:
                passed_params[passed] -= 1
                same[eqn.result] = eqn.operands[0]
                continue
        backward.append(eqn)
    outputs = tuple((port, same.get(value, value)) for port, value in joint.outputs)
    return (
        replace(joint, forward=tuple(forward), backward=tuple(backward), outputs=outputs),
        found,
    )


def _take_in(eqn: Eqn, floor: int, joint: Joint, found: FreeValues) -> None:
    depends = 0
    for operand in eqn.operands:
        depends |= found.flags[operand]
    movable = not depends & STATE and depends & (PARAM | BATCH) != PARAM | BATCH
    reachable = all(o in found.copies or o in joint.inputs for o in eqn.operands)
    is_copy = movable and reachable and is_cheap(eqn) and not (depends & PARAM and _shrinks(eqn))
    if is_copy:
        found.copies.update((eqn, *eqn.results))
    if is_copy or not floor:
        found.flags.update(dict.fromkeys(eqn.results, depends))


def _shrinks(eqn: Eqn) -> bool:
    """Whether the results are much smaller than what they are made of: they are sent rather than a parameter shared."""
    operand_bytes = sum(o.type.num_bytes for o in eqn.operands)
    return PARAM_SHRINKAGE * sum(r.type.num_bytes for r in eqn.results) < operand_bytes


def only_param(joint: Joint) -> dict[Eqn, str]:
    """For each equation of the backward, the parameter to whose gradient alone it leads; "" where to several, and
    where a marker is on the way."""
    leads_to: dict[Value, str] = {}

    def lead(value: Value, name: str) -> None:
        leads_to[value] = name if leads_to.get(value, name) == name else ""

    for port, value in joint.outputs_of("param_grad"):
        lead(value, port.name)
    found: dict[Eqn, str] = {}
    for eqn in reversed(joint.backward):
        names = {leads_to[r] for r in eqn.results if r in leads_to}
        found[eqn] = names.pop() if len(names) == 1 else ""
        for operand in eqn.operands:
            lead(operand, "" if eqn.op is boundary else found[eqn])
    return found
