"""Where the values of the forward are, and sets of stages as bit masks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.passes.free_values import FreeValues


@dataclass
class ForwardStages:
    """Where the values of the forward are. Sets of stages are bit masks.

    placed: the stages that compute an equation; none for a marker.
    defined: the stages that compute a value, or receive it at a marker. An input that every stage may read has none.
    used: the stages whose forward reads a value.
    free: what may be computed anywhere.
    """

    free: FreeValues
    placed: dict[Eqn, int] = field(default_factory=dict)
    defined: dict[Value, int] = field(default_factory=dict)
    used: dict[Value, int] = field(default_factory=dict)

    def home(self, value: Value) -> int:
        """The first stage that has a value; 0 for an input that every stage may read."""
        return first(self.defined.get(value, 1))


def first(stages: int) -> int:
    """The lowest stage of a set."""
    return (stages & -stages).bit_length() - 1


def last(stages: int) -> int:
    """The highest stage of a set."""
    return stages.bit_length() - 1


def members(stages: int) -> Iterator[int]:
    """The stages of a set, lowest first."""
    while stages:
        yield first(stages)
        stages &= stages - 1
