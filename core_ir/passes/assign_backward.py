"""Which stages compute each equation of the backward.

A gradient is computed in the highest stage, at or below those its operands come from, that has the forward values it
reads; but what has the size of a parameter and leads to its gradient alone, where that parameter is used. Cotangents of
one value from several stages are added where the sum is used. What recomputes forward values stands with its users. A
wait stands with the start of its collective.
A sum of gradients of one parameter over several stages is taken apart: each stage gives its own part.
"""

from plait.core_ir.graph import Value
from plait.core_ir.ops.collective import wait
from plait.core_ir.ops.control import boundary
from plait.core_ir.ops.elementwise import add
from plait.core_ir.passes.availability import Availability
from plait.core_ir.passes.backward_stages import BackwardStages
from plait.core_ir.passes.forward_stages import ForwardStages, last
from plait.core_ir.passes.free_values import is_cheap, only_param
from plait.core_ir.passes.joint import Joint
from plait.core_ir.passes.partial_gradients import give_gradients


def assign_backward(joint: Joint, forward: ForwardStages) -> BackwardStages:
    """Stages of the backward."""
    stages = BackwardStages()
    available = Availability(joint, forward)
    params = {p.name: v for v, p in joint.inputs.items() if p.role == "param"}
    users = {name: forward.used.get(value, 0) for name, value in params.items()}
    leads_to = only_param(joint)
    same: dict[Value, Value] = {}  # what the result of a marker that does not cut stands for
    loss_stage = max((forward.home(v) for _, v in joint.outputs_of("loss")), default=0)
    for value, port in joint.inputs.items():
        if port.role == "loss_grad":
            stages.home[value] = loss_stage
    for original in joint.backward:
        eqn = original.with_operands([same.get(o, o) for o in original.operands])
        bounds = [stages.home[o] for o in eqn.operands if o in joint.gradients]
        if eqn.op is boundary and bounds[0] <= eqn.attrs["index"]:
            same[eqn.result] = eqn.operands[0]
            continue
        stages.eqns.append(eqn)
        if not bounds:
            available.add(eqn)
        elif eqn.op is boundary:
            stages.home[eqn.result] = eqn.attrs["index"]
        elif eqn.op is add and len(set(bounds)) == 2:
            stages.late_sums.add(eqn)
            stages.home[eqn.result] = min(bounds)
        elif eqn.op is wait:
            stages.place(eqn, bounds[0])
        else:
            read = [o for o in eqn.operands if o not in joint.gradients]
            param = params.get(leads_to[original])
            is_tail = param is not None and all(r.type.size == param.type.size for r in eqn.results)
            preferred = users[leads_to[original]] if is_tail else 0
            stage = available.pick(read, min(bounds), preferred)
            stages.place(eqn, stage)
    give_gradients(
        [(p, same.get(v, v)) for p, v in joint.outputs_of("param_grad")], users, available, stages
    )
    _place(stages)
    return stages


def _place(stages: BackwardStages) -> None:
    """Fill `used`, users first, and place late sums and what recomputes forward values."""
    used, home = stages.used, stages.home
    sender: dict[Value, int] = {}  # the stages behind the markers that a late sum passes
    for _, value, stage in stages.outputs:
        used[value] = used.get(value, 0) | 1 << stage
    for eqn in reversed(stages.eqns):
        if eqn.op is boundary:
            (operand,) = eqn.operands
            behind = min(eqn.attrs["index"] + 1, home[operand])
            sender[operand] = sender.get(operand, 0) | 1 << behind
            continue
        if eqn not in stages.placed:
            where = 0
            for result in eqn.results:
                where |= used.get(result, 0) | sender.get(result, 0)
            is_copied = eqn not in stages.late_sums and is_cheap(eqn)
            stages.placed[eqn] = where if is_copied else 1 << last(where)
            home.update(dict.fromkeys(eqn.results, last(where)))
        for operand in eqn.operands:
            used[operand] = used.get(operand, 0) | stages.placed[eqn]
