"""What crosses between stages, as messages: one for each (stage, microbatch, peer)."""

from collections.abc import Sequence

from plait.core_ir.program import EdgeKind, Program, TaskKind
from plait.core_ir.types import TensorType


def message_types(program: Program, source: int, target: int, kind: EdgeKind) -> list[TensorType]:
    """Types of the values that `source` sends `target` for one microbatch, in the order of the program's edges."""
    task: TaskKind = "F" if kind == "activation" else "I"
    graph = program.task(source, task)
    types = dict(zip(graph.output_ports, graph.output_types, strict=True))
    return [types[e.output] for e in program.edges_from(source, kind) if e.target == target]


def largest_messages(program: Program) -> dict[tuple[int, int], list[TensorType]]:
    """For each (source stage, target stage) with an edge, in one order for all: the types of its largest message."""
    found: dict[tuple[int, int], list[TensorType]] = {}
    for source, target, kind in sorted(program.edge_kinds()):
        types = message_types(program, source, target, kind)
        found[source, target] = max(found.get((source, target), []), types, key=num_bytes)
    return found


def stage_elsewhere(placement: Sequence[int], source: int, target: int) -> int:
    """`target` where it is on another rank than `source`, else a stage that is; `target` where there is none."""
    stages = (target, *range(len(placement)))
    return next((s for s in stages if placement[s] != placement[source]), target)


def num_bytes(types: Sequence[TensorType]) -> int:
    """The bytes of a message."""
    return sum(type.num_bytes for type in types)
