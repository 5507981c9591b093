"""Where values of parameters alone are computed: with the parameters, rather than with who uses the value.

A penalty on every parameter is used in the last stage, but computed where each parameter is: a number crosses, not the
parameter.
"""

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.forward_stages import ForwardStages, first
from plait.core_ir.passes.free_values import PARAM, FreeValues
from plait.core_ir.passes.joint import Joint


def find_param_homes(joint: Joint, stages: ForwardStages) -> dict[Eqn, int]:
    """The stage of each equation of parameters alone that is no copy: where the last of its parameters is used first.

    `stages` is a first placement, in which these equations stand with their users. Equations of a parameter that
    nothing else uses are left out.
    """
    free = stages.free
    users: dict[
        Value, int
    ] = {}  # the stages that use a value for something that is not of parameters alone
    for eqn in reversed(joint.forward):
        if _is_of_params(eqn, free):
            if eqn not in free.copies:
                continue
            where = 0
            for result in eqn.results:
                where |= users.get(result, 0)
        else:
            where = 1 << eqn.attrs["index"] if eqn.op is boundary else stages.placed[eqn]
        for operand in eqn.operands:
            users[operand] = users.get(operand, 0) | where
    home: dict[Value, int] = {
        v: first(users[v])
        for v, port in joint.inputs.items()
        if port.role == "param" and users.get(v, 0)
    }
    homes: dict[Eqn, int] = {}
    for eqn in joint.forward:
        known = [home[o] for o in eqn.operands if o in home]
        if not _is_of_params(eqn, free) or not known:
            continue
        home.update(dict.fromkeys(eqn.results, max(known)))
        if eqn not in free.copies:
            homes[eqn] = max(known)
    return homes


def _is_of_params(eqn: Eqn, free: FreeValues) -> bool:
    return bool(eqn.results) and free.flags.get(eqn.results[0]) == PARAM
