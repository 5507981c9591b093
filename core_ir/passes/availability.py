"""Which stages have a forward value when the backward runs, and the best stage for an equation that reads several."""

from collections.abc import Iterable

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.passes.forward_stages import ForwardStages, last
from plait.core_ir.passes.joint import Joint


class Availability:
    """Stages that have a value at hand, that could compute it, and the first that it could be sent to."""

    def __init__(self, joint: Joint, forward: ForwardStages) -> None:
        self.num_stages = joint.num_stages
        self._everywhere = (1 << joint.num_stages) - 1
        self._inputs = joint.inputs
        self._forward = forward
        self._recomputed: dict[Value, tuple[int, int, int]] = {}

    def add(self, eqn: Eqn) -> None:
        """Take in an equation of the backward that reads forward values only."""
        stages = self._meet(eqn.operands)
        self._recomputed.update(dict.fromkeys(eqn.results, stages))

    def pick(self, operands: Iterable[Value], bound: int, preferred: int) -> int:
        """The stage, at most `bound`, for an equation that reads these forward values.

        The highest that has them all, if it can be one of `preferred`; else the highest that could compute them; else
        the one that has the last of them, to which the others are sent.
        """
        at_hand, computable, origin = self._meet(operands)
        below = (1 << (bound + 1)) - 1
        for stages in (at_hand & preferred, at_hand, computable & preferred, computable):
            if stages & below:
                return last(stages & below)
        return min(origin, bound)

    def _meet(self, operands: Iterable[Value]) -> tuple[int, int, int]:
        at_hand = computable = self._everywhere
        origin = 0
        for operand in operands:
            here, anywhere, home = self._of(operand)
            at_hand, computable, origin = at_hand & here, computable & anywhere, max(origin, home)
        return at_hand, computable, origin

    def _of(self, value: Value) -> tuple[int, int, int]:
        if value in self._recomputed:
            return self._recomputed[value]
        forward = self._forward
        here = forward.defined.get(value, 0) | forward.used.get(value, 0)
        if forward.free.is_constant(value):
            return self._everywhere, self._everywhere, 0
        if value in forward.free.copies or (value in self._inputs and value not in forward.defined):
            return here, self._everywhere, 0
        return here, here, forward.home(value)
