"""Where the values of the backward are."""

from dataclasses import dataclass, field

from plait.core_ir.graph import Eqn, Port, Value


@dataclass
class BackwardStages:
    """Where the values of the backward are. Sets of stages are bit masks.

    eqns: the equations in order, sums over stages taken apart; markers that do not cut are gone.
    late_sums: additions of cotangents from two stages, computed where the sum is used.
    placed: the stages that compute an equation; none for a marker.
    home: the stage that a gradient, or a value recomputed once, is sent from.
    used: the stages whose backward reads a value (of the forward too).
    outputs: the parameter gradients: port, value, stage.
    """

    eqns: list[Eqn] = field(default_factory=list)
    late_sums: set[Eqn] = field(default_factory=set)
    placed: dict[Eqn, int] = field(default_factory=dict)
    home: dict[Value, int] = field(default_factory=dict)
    used: dict[Value, int] = field(default_factory=dict)
    outputs: list[tuple[Port, Value, int]] = field(default_factory=list)

    def place(self, eqn: Eqn, stage: int) -> None:
        """Have one stage compute an equation."""
        self.placed[eqn] = 1 << stage
        self.home.update(dict.fromkeys(eqn.results, stage))
