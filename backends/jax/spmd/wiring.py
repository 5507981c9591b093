"""Tasks connected to pools: from which row and place each input comes, and to which each output goes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from plait.backends.jax.spmd.layout import Place
from plait.backends.jax.spmd.pools import MICROBATCH_ROLES, PHASES, Pools
from plait.core_ir import mesh
from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Graph, Port
from plait.core_ir.passes.structure import graph_digest
from plait.core_ir.program import PAIR, Program, TaskKind
from plait.core_ir.types import TensorType

Body: TypeAlias = str
"""F, I, W, or F&B: tasks of one kind share a loop of the program."""

TaskKey: TypeAlias = tuple[Body, tuple[int, ...]]
"""A task: its kind and its stages, of a pair that of the backward and that of the forward."""

BACKWARD: TaskKind = "B"
FORWARD: TaskKind = "F"


@dataclass(frozen=True)
class Read:
    """An input: what stands at a place of a row of a pool; `column` tells the rows apart that one task reads.

    placement: how it lies over auto axes, where that is known.
    """

    pool: str
    column: int
    place: Place
    type: TensorType
    placement: mesh.Layout = ()


@dataclass(frozen=True)
class Write:
    """Where a value goes; `value` counts the task's inputs, then its outputs."""

    value: int
    pool: str
    place: Place
    placement: mesh.Layout = ()


class Row(NamedTuple):
    """Whose row it is, and of which part of a task the microbatch."""

    owner: int
    part: int


@dataclass(frozen=True)
class Wired:
    """One task with its inputs and outputs connected.

    stages: of its parts: one, or of a pair that of the backward and that of the forward. `rows[pool, column]` is what
    is read there; `written[pool]` the row that is written, always one of a part's own stage.
    """

    kind: Body
    stages: tuple[int, ...]
    graph: Graph
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    rows: Mapping[tuple[str, int], Row]
    written: Mapping[str, Row]

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for tasks that one piece of program can run, given the rows."""
        return (self.kind, graph_digest(self.graph), self.reads, self.writes)


def wire(
    program: Program, pools: Pools, placement: Sequence[int], kinds: Sequence[TaskKind]
) -> dict[TaskKey, Wired]:
    """The tasks of these kinds, by kind and stages, connected; with all kinds the pairs too.

    Raises VerifyError for an input that nothing before its task gives.
    """
    tasks: dict[TaskKey, Wired] = {
        (kind, (stage.index,)): _wire_task(
            pools, kind, stage.index, placement[stage.index], stage.tasks[kind]
        )
        for kind in kinds
        for stage in program.stages
    }
    for (forward, backward), graph in program.pairs.items() if set(kinds) == set(PHASES) else ():
        halves = [
            _wire_task(pools, kind, stage, placement[stage], program.task(stage, kind))
            for kind, stage in ((BACKWARD, backward), (FORWARD, forward))
        ]
        tasks[PAIR, (backward, forward)] = _wire_pair(graph, *halves)
    return tasks


def _wire_pair(graph: Graph, backward: Wired, forward: Wired) -> Wired:
    """A pair: the columns of the forward's reads stand behind the backward's, its values too."""
    behind = Counter(pool for pool, _ in backward.rows)
    reads = (
        *backward.reads,
        *(replace(r, column=r.column + behind[r.pool]) for r in forward.reads),
    )
    num_inputs = [len(half.graph.inputs) for half in (backward, forward)]
    num_outputs = len(backward.graph.outputs)

    def value(number: int, part: int) -> int:
        """Inputs of both halves, then outputs of both."""
        if number < num_inputs[part]:
            return number + (num_inputs[0] if part else 0)
        return number + num_inputs[1 - part] + (num_outputs if part else 0)

    writes = tuple(
        replace(write, value=value(write.value, part))
        for part, half in enumerate((backward, forward))
        for write in half.writes
    )
    rows = dict(backward.rows)
    rows.update(
        ((pool, column + behind[pool]), Row(row.owner, 1))
        for (pool, column), row in forward.rows.items()
    )
    written = {
        **backward.written,
        **{pool: Row(row.owner, 1) for pool, row in forward.written.items()},
    }
    return Wired(PAIR, (*backward.stages, *forward.stages), graph, reads, writes, rows, written)


def _wire_task(pools: Pools, kind: TaskKind, stage: int, rank: int, graph: Graph) -> Wired:
    columns: dict[tuple[str, int], int] = {}
    reads = []
    for port, value in zip(graph.input_ports, graph.inputs, strict=True):
        pool, owner, held = _source(pools, kind, stage, rank, port)
        in_pool = sum(1 for other, _ in columns if other == pool)
        column = columns.setdefault((pool, owner), in_pool)
        place = pools.place(pool, owner, held)
        reads.append(Read(pool, column, place, value.type, pools.placement(port)))
    values = [*graph.input_ports, *graph.output_ports]
    writes = [
        Write(number, pool, pools.place(pool, stage, held), pools.placement(held))
        for number, port in enumerate(values)
        for pool, held in _sinks(pools, kind, stage, port, is_input=number < len(graph.inputs))
    ]
    rows = {(pool, column): Row(owner, 0) for (pool, owner), column in columns.items()}
    written = {write.pool: Row(stage, 0) for write in writes}
    return Wired(kind, (stage,), graph, tuple(reads), tuple(writes), rows, written)


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
            "B": ("grads.I", "grads.W", *pools.offsets),
        }[kind]
    if port.role == "buffer_update":
        yield "state", Port("buffer", port.name)
    for pool in candidates:
        if port in pools.held(pool, stage):
            yield pool, port
