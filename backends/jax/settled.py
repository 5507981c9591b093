"""How the values of a program's tasks come to lie: told before, or as the compiler chose where they are made.

NOTE: on auto axes XLA chooses how what a task makes lies, and whoever reads it is compiled for that. So the same arrays
fit in every step, and nothing is moved within a stage; between stages a value keeps its spec.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from plait.backends.jax.submesh import Spread, Spreads
from plait.core_ir.graph import Graph, Port, Role
from plait.core_ir.program import Program, TaskKind

_CHOSEN: frozenset[Role] = frozenset({"activation", "gradient", "residual", "handover"})


@dataclass
class Settled:
    """The spread of each port of each stage, so far as it is known."""

    program: Program
    spreads: Spreads
    _chosen: dict[tuple[int, Port], Spread] = field(default_factory=dict)

    @property
    def between(self) -> Spread | None:
        """Of what stays within a task; None: as the compiler chooses."""
        return None if self.spreads.has_auto else self.spreads.by_device

    def of(self, stage: int, port: Port) -> Spread | None:
        """Of what stands at a port; None where the compiler is to choose that still."""
        is_open = port.role in _CHOSEN or (
            port.role == "param_grad" and not self.spreads.is_placed(port.name)
        )
        if is_open and self.spreads.has_auto:
            return self._chosen.get((stage, port))
        return self.spreads.of(port)

    def given(self, stage: int, graph: Graph) -> list[Spread]:
        """Of the inputs of a task, where what it reads is made before."""
        return [self.of(stage, port) or self.spreads.by_device for port in graph.input_ports]

    def note(self, stage: int, graph: Graph, gives: Sequence[Spread]) -> None:
        """Take down how the outputs of a task lie, for who reads them in this stage and in others."""
        made = dict(zip(graph.output_ports, gives, strict=True))
        self._chosen.update(((stage, port), spread) for port, spread in made.items())
        for edge in self.program.edges:
            if edge.source == stage and edge.output in made:
                self._chosen[edge.target, edge.input] = made[edge.output]


def in_order(program: Program) -> Iterator[tuple[int, TaskKind, Graph]]:
    """F, I and W of all stages, what is made before what reads it."""
    for stage in range(program.num_stages):
        yield stage, "F", program.task(stage, "F")
    for stage in reversed(range(program.num_stages)):
        for kind in ("I", "W"):
            yield stage, kind, program.task(stage, kind)
