"""Which stages compute each equation of the forward.

An equation that a marker dominates has one stage: the latest that its operands come from, a marker raising it by one.
All others are free: copies stand in each stage that uses them, the rest in the first stage that does, or where their
parameters are (`param_homes`). An output that nothing else uses is computed where its operands are.
"""

from typing import TypeAlias

from plait.core_ir.errors import PartitionError
from plait.core_ir.graph import Eqn, Port, Value
from plait.core_ir.ops.collective import STARTS
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.equations import has_effect
from plait.core_ir.passes.forward_stages import ForwardStages, first
from plait.core_ir.passes.free_values import STATE, FreeValues, changing_buffers
from plait.core_ir.passes.joint import Joint
from plait.core_ir.passes.param_homes import find_param_homes

_Stages: TypeAlias = dict[Eqn | Value, int]


def assign_forward(joint: Joint, free: FreeValues) -> ForwardStages:
    """Stages of the forward. PartitionError where a value would have to flow to an earlier stage."""
    updates = changing_buffers(joint)
    owner: dict[Value, int] = {}
    while True:
        anchored = _anchored_stages(joint, free, owner)
        found = {v: anchored[update] for v, update in updates.items() if update in anchored}
        if found == owner:
            break
        owner = found
    stages = ForwardStages(free)
    _place(joint, anchored, {}, {}, stages)
    sinks = _place_sinks(joint, anchored, stages)
    homes = find_param_homes(joint, stages)
    if sinks or homes:
        _place(joint, anchored, sinks, homes, stages)
    for _ in updates:  # the update of a buffer may be another buffer as it was
        stages.defined.update((v, 1 << stages.home(update)) for v, update in updates.items())
    _check_order(joint, stages)
    return stages


def _anchored_stages(joint: Joint, free: FreeValues, owner: dict[Value, int]) -> _Stages:
    """The stage of all that stands behind a marker, and of state whose update does."""
    stage: _Stages = dict(owner.items())
    for eqn in joint.forward:
        known = [stage[o] for o in eqn.operands if o in stage]
        if floor := free.floors.get(eqn):
            known.append(floor)
        if eqn.op is boundary:
            index = eqn.attrs["index"]
            if known and known[0] > index:
                raise PartitionError(_wrong_way(joint, eqn, known[0], owner))
            stage[eqn.result] = index + 1
        elif known:
            stage.update(dict.fromkeys((eqn, *eqn.results), max(known)))
    return stage


def _wrong_way(joint: Joint, marker: Eqn, stage: int, owner: dict[Value, int]) -> str:
    late = [f"{joint.inputs[v]}, which stage {s} updates" for v, s in owner.items() if s == stage]
    cause = (
        f"it may depend on {' or on '.join(late)}"
        if late
        else "boundaries must be met in the order of their cuts"
    )
    return (
        f"boundary {marker.attrs['index']} ({marker.source}) gets the value {marker.operands[0]!r} from stage {stage}:"
        f" a value cannot flow to an earlier stage; {cause}"
    )


def _place(
    joint: Joint,
    anchored: _Stages,
    sinks: dict[Eqn, int],
    homes: dict[Eqn, int],
    stages: ForwardStages,
) -> None:
    """Fill `placed`, `defined` and `used`, users first.

    sinks: stages (as sets) of equations that nothing uses. homes: the highest stage of some others.
    """
    stages.placed, stages.defined, stages.used = {}, {}, {}
    used, defined = stages.used, stages.defined
    for eqn in reversed(joint.forward):
        if eqn.op is boundary:
            (operand,), index = eqn.operands, eqn.attrs["index"]
            defined[eqn.result] = 1 << (index + 1)
            if operand not in anchored:
                used[operand] = used.get(operand, 0) | 1 << index
            continue
        if eqn in anchored:
            where = 1 << anchored[eqn]
        else:
            where = sinks.get(eqn, 0)
            for result in eqn.results:
                where |= used.get(result, 0)
            if eqn not in stages.free.copies:
                where &= -where
                where = min(where, 1 << homes[eqn]) if eqn in homes else where
        stages.placed[eqn] = where
        for result in eqn.results:
            defined[result] = where
        for operand in eqn.operands:
            used[operand] = used.get(operand, 0) | where


def _place_sinks(joint: Joint, anchored: _Stages, stages: ForwardStages) -> dict[Eqn, int]:
    """The stage (as a set) of the free equations that give an output and that nothing places."""
    estimate: dict[Value, int] = {}
    for eqn in joint.forward:
        if eqn.op is boundary or eqn in anchored:
            continue
        where = stages.placed[eqn]
        if where:
            stage = 0 if eqn in stages.free.copies else first(where)
        else:
            stage = max((estimate.get(o, 0) for o in eqn.operands), default=0)
        estimate.update(dict.fromkeys(eqn.results, stage))
    producers = {r: e for e in joint.forward for r in e.results}
    sinks = {
        eqn: 1 << max((estimate.get(o, 0) for o in eqn.operands), default=0)
        for eqn in joint.forward
        if has_effect(eqn) and eqn.op not in STARTS  # which stand with their wait
        if eqn not in anchored and not stages.placed[eqn]
    }
    siblings = _module_stages(joint, anchored, estimate)
    buffers = {port.name: value for value, port in joint.inputs.items() if port.role == "buffer"}
    for port, value in joint.outputs_of("loss", "aux", "buffer_update"):
        producer = producers.get(value)
        if producer is None or value in anchored or stages.placed.get(producer):
            continue
        stage = estimate[value]
        if port.role == "buffer_update" and stages.free.flags[value] in (0, STATE):
            readers = stages.used.get(buffers[port.name], 0) if port.name in buffers else 0
            latest = first(readers) if readers else joint.num_stages
            stage = min(siblings.get(_module(port), stage), latest)
        sinks[producer] = 1 << stage
    return sinks


def _module_stages(joint: Joint, anchored: _Stages, estimate: dict[Value, int]) -> dict[str, int]:
    """The last stage that updates a buffer of each module."""
    found: dict[str, int] = {}
    for port, value in joint.outputs_of("buffer_update"):
        stage = anchored.get(value, estimate.get(value, 0))
        found[_module(port)] = max(stage, found.get(_module(port), 0))
    return found


def _module(port: Port) -> str:
    return port.name.rpartition(".")[0]


def _check_order(joint: Joint, stages: ForwardStages) -> None:
    for eqn in joint.forward:
        stage = eqn.attrs["index"] if eqn.op is boundary else first(stages.placed[eqn])
        for operand in eqn.operands:
            if (home := stages.home(operand)) > stage:
                port = joint.inputs.get(operand)
                raise PartitionError(
                    f"{eqn.op.name} ({eqn.source}) stands in stage {stage}, but reads {port or repr(operand)}, which"
                    f" stage {home} {'updates' if port else 'computes'}: a value cannot flow to an earlier stage"
                )
