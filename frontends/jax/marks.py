"""Boundary markers met while lowering: which of them cut, their numbers, and which backward marker belongs to which;
and what else is noted of a whole program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait.core_ir.graph import Value
from plait.frontends.jax.jaxpr import ClosedJaxpr, Jaxpr, jaxprs_of
from plait.frontends.jax.sharded import Operand

BOUNDARY, TANGENT, COTANGENT = (
    "stage_boundary",
    "stage_boundary_tangent",
    "stage_boundary_cotangent",
)


@dataclass
class Marks:
    """The cuts of one capture, numbered in order of execution.

    cuts: whether a marker with that path cuts (others are identities).
    paths: the path of each cut.
    backward: every value computed from the cotangent of the loss.
    slices: for each stack made by unrolling a scan, what was stacked.
    num_met: how many markers were met, forward and backward.
    left: axes that a `shard_map` leaves to the compiler, with the line of the first that does.
    """

    cuts: Callable[[str], bool]
    paths: list[str] = field(default_factory=list)
    backward: set[Value] = field(default_factory=set)
    num_met: int = 0
    left: dict[str, str] = field(default_factory=dict)
    slices: dict[Value, Sequence[Operand]] = field(default_factory=dict)
    _outputs: dict[int, list[Sequence[Operand]]] = field(default_factory=dict)
    _numbers_left: dict[int, list[int]] = field(default_factory=dict)

    @property
    def in_backward(self) -> bool:
        """Whether anything was computed from the cotangent of the loss yet; True where none was given."""
        return len(self.backward) != 1

    def open(self, uid: int, path: str) -> int:
        """The number of the next cut."""
        index = len(self.paths)
        self.paths.append(path)
        self.num_met += 1
        self._numbers_left.setdefault(uid, []).append(index)
        return index

    def keep(self, uid: int, outputs: Sequence[Operand]) -> None:
        """Remember what a forward marker gave."""
        self._outputs.setdefault(uid, []).append(outputs)

    def close(self, uid: int) -> int | None:
        """The number of the cut a backward marker stands at: the last one of its uid that has none yet."""
        self.num_met += 1
        left = self._numbers_left.get(uid)
        return left.pop() if left else None

    def outputs(self, uid: int) -> Sequence[Operand] | None:
        """What the only forward marker of a uid gave; None where there were several, or none."""
        known = self._outputs.get(uid, [])
        return known[0] if len(known) == 1 else None

    def inside(self, jaxpr: ClosedJaxpr | Jaxpr) -> bool:
        """Whether a marker that cuts stands anywhere in a jaxpr."""
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name in (BOUNDARY, COTANGENT) and self.cuts(eqn.params["path"]):
                return True
            if any(self.inside(inner) for inner in jaxprs_of(eqn)):
                return True
        return False
