"""The price in bytes of having a value at hand in another task: kept as it is, or what its views are made of."""

from collections.abc import Callable, Mapping

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops.control import barrier
from plait.core_ir.ops.elementwise import convert
from plait.core_ir.passes.equations import VIEWS


def is_view(eqn: Eqn) -> bool:
    """Whether computing an equation again is free, since compilers fold it into what reads it."""
    return eqn.op in VIEWS or eqn.op is convert or (eqn.op is barrier and len(eqn.operands) == 1)


def price(value: Value, producers: Mapping[Value, Eqn], at_hand: Callable[[Value], bool]) -> int:
    """Bytes to keep so that a value can be read: none when it is at hand, those under a view when these are fewer."""
    if at_hand(value):
        return 0
    eqn = producers.get(value)
    if eqn is None or not is_view(eqn):
        return value.type.num_bytes
    below = sum(price(o, producers, at_hand) for o in eqn.operands)
    return min(below, value.type.num_bytes)
