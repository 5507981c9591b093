"""Tasks connected to pools: from which row and place each input comes, and to which each output goes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.backends.jax.spmd.layout import Place
from plait.backends.jax.spmd.pools import MICROBATCH_ROLES, Pools
from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Graph, Port
from plait.core_ir.passes.structure import graph_digest
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.types import TensorType


@dataclass(frozen=True)
class Read:
    """An input: what stands at a place of a row of a pool; `column` tells the rows apart that one task reads."""

    pool: str
    column: int
    place: Place
    type: TensorType


@dataclass(frozen=True)
class Write:
    """Where a value goes; `value` counts the task's inputs, then its outputs."""

    value: int
    pool: str
    place: Place


@dataclass(frozen=True)
class Wired:
    """One task of one stage with its inputs and outputs connected.

    `owners[pool, column]` is the owner of the row read there.
    """

    kind: TaskKind
    stage: int
    graph: Graph
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    owners: Mapping[tuple[str, int], int]

    @property
    def written(self) -> frozenset[str]:
        """The pools this task writes a row of: always its own stage's."""
        return frozenset(w.pool for w in self.writes)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for tasks that one piece of program can run, given the rows."""
        return (self.kind, graph_digest(self.graph), self.reads, self.writes)


def wire(
    program: Program, pools: Pools, placement: Sequence[int], kinds: Sequence[TaskKind]
) -> dict[tuple[TaskKind, int], Wired]:
    """The tasks of these kinds, by kind and stage, connected.

    Raises VerifyError for an input that nothing before its task gives.
    """
    return {
        (kind, stage.index): _wire_task(
            pools, kind, stage.index, placement[stage.index], stage.tasks[kind]
        )
        for kind in kinds
        for stage in program.stages
    }


def _wire_task(pools: Pools, kind: TaskKind, stage: int, rank: int, graph: Graph) -> Wired:
    columns: dict[tuple[str, int], int] = {}
    reads = []
    for port, value in zip(graph.input_ports, graph.inputs, strict=True):
        pool, owner, held = _source(pools, kind, stage, rank, port)
        in_pool = sum(1 for other, _ in columns if other == pool)
        column = columns.setdefault((pool, owner), in_pool)
        reads.append(Read(pool, column, pools.place(pool, owner, held), value.type))
    values = [*graph.input_ports, *graph.output_ports]
    writes = [
        Write(number, pool, pools.place(pool, stage, held))
        for number, port in enumerate(values)
        for pool, held in _sinks(pools, kind, stage, port, is_input=number < len(graph.inputs))
    ]
    owners = {(pool, column): owner for (pool, owner), column in columns.items()}
    return Wired(kind, stage, graph, tuple(reads), tuple(writes), owners)


def _source(
    pools: Pools, kind: TaskKind, stage: int, rank: int, port: Port
) -> tuple[str, int, Port]:
    """The pool, the owner of the row, and under which port the value stands in it."""
    arrival = pools.arrivals.get((stage, port))
    if arrival is not None:
        return arrival.pool, arrival.source, arrival.port
    if port.role in MICROBATCH_ROLES:
        return "microbatch", rank, port
    # A task of the backward reads a changed buffer where F saved it.
    kept = ("state",) if kind == "F" else ("handover", "saved.I", "saved.W")
    for pool in ("params", "frozen", "buffers", *kept):
        if port in pools.held(pool, stage):
            return pool, stage, port
    raise VerifyError(
        f"stage {stage}, task {kind}: no edge and no task before gives its input {port}"
    )


def _sinks(
    pools: Pools, kind: TaskKind, stage: int, port: Port, *, is_input: bool
) -> Iterator[tuple[str, Port]]:
    """The pools a value of this task goes to, and under which port."""
    candidates: tuple[str, ...]
    if is_input:
        # Only F's view of a buffer that it changes has to be kept; every other input stays where it is.
        is_state = kind == "F" and port in pools.held("state", stage)
        candidates = ("saved.I", "saved.W") if is_state else ()
    else:
        candidates = {
            "F": ("saved.I", "saved.W", "loss", "aux", *pools.offsets),
            "I": ("grads.I", "handover", *pools.offsets),
            "W": ("grads.W",),
        }[kind]
    if port.role == "buffer_update":
        yield "state", Port("buffer", port.name)
    for pool in candidates:
        if port in pools.held(pool, stage):
            yield pool, port
