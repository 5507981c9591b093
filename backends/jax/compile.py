"""Compiling one task: a graph becomes an executable of one submesh, shared by structurally equal graphs."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from plait.backends.jax.emit import emit
from plait.backends.jax.private import own_context, shape_struct
from plait.backends.jax.settled import Settled, in_order
from plait.backends.jax.submesh import Spread, Submesh
from plait.backends.parts import PartedTask, cut_pair
from plait.core_ir.graph import Graph
from plait.core_ir.passes.structure import graph_digest
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.types import TensorType

COMPILER_OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}
"""A conversion to a narrower dtype rounds, as the op says, even where it is converted back at once."""

_MOST_KEPT = 512
_artifacts: OrderedDict[tuple[object, ...], jax.stages.Compiled] = OrderedDict()
"""Executables of this process by structure, submesh and how values are spread, the latest used last."""


@dataclass(frozen=True)
class CompiledTask:
    """A task as a function of arrays on its submesh, one for each input; gives those of its outputs.

    No array that it is given is donated or changed.

    Attributes
    ----------
    compile_seconds: what compiling took now; 0.0 where an artifact of an equal graph was there.
    gives: how outputs are spread.
    """

    graph: Graph
    submesh: Submesh
    compile_seconds: float
    executable: jax.stages.Compiled = field(repr=False)
    gives: tuple[Spread, ...] = ()

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        with own_context():
            return list(self.executable(*arrays))


def compile_task(
    graph: Graph,
    *,
    submesh: Submesh | None = None,
    reads: Sequence[Spread] | None = None,
    gives: Sequence[Spread | None] | None = None,
) -> CompiledTask:
    """Compile a graph for one submesh (default: the first device), ahead of any call.

    reads, gives: how inputs and outputs are spread; by default not at all. An output for which None stands is led, and
    the compiler chooses how it lies over auto axes.

    Raises UnsupportedError where an equation cannot be emitted, with the user's line.
    """
    submesh = Submesh((jax.devices()[0],)) if submesh is None else submesh
    reads = tuple(reads or (Spread(),) * len(graph.inputs))
    gives = tuple(gives or (Spread(),) * len(graph.outputs))
    key = (graph_digest(graph), submesh, reads, gives)
    start = time.perf_counter()
    executable = _artifacts.pop(key, None)
    seconds = 0.0
    if executable is None:
        executable = compile_function(emit(graph), graph.input_types, submesh, reads, gives)
        seconds = time.perf_counter() - start
    _artifacts[key] = executable
    if len(_artifacts) > _MOST_KEPT:
        _artifacts.popitem(last=False)
    found = zip(gives, executable.output_shardings, strict=True)
    spreads = tuple(submesh.spread(s) if given is None else given for given, s in found)
    return CompiledTask(graph, submesh, seconds, executable, spreads)


def compile_function(
    function: Callable[..., tuple[jax.Array, ...]],
    types: Sequence[TensorType],
    submesh: Submesh,
    reads: Sequence[Spread],
    gives: Sequence[Spread | None],
) -> jax.stages.Compiled:
    """Compile what each device of a submesh runs; types are those of a device's values."""
    with own_context(submesh.mesh if submesh.auto else None):
        wholes = [(submesh.type(t, s), s) for t, s in zip(types, reads, strict=True)]
        operands = [shape_struct(t.shape, t.dtype.numpy, submesh.sharding(s)) for t, s in wholes]
        # An input that nothing reads stays an input: callers pass all of them.
        jitted = jax.jit(
            submesh.over(function, reads, gives),
            keep_unused=True,
            out_shardings=tuple(None if s is None else submesh.sharding(s) for s in gives),
        )
        return jitted.lower(*operands).compile(compiler_options=COMPILER_OPTIONS)


def compile_stages(
    settled: Settled, submeshes: Sequence[Submesh]
) -> dict[tuple[int, TaskKind], CompiledTask]:
    """Compile F, I and W of each stage for its submesh, and settle how what they make lies."""
    tasks: dict[tuple[int, TaskKind], CompiledTask] = {}
    for stage, kind, graph in in_order(settled.program):
        task = compile_task(
            graph,
            submesh=submeshes[stage],
            reads=settled.given(stage, graph),
            gives=[settled.of(stage, port) for port in graph.output_ports],
        )
        settled.note(stage, graph, task.gives)
        tasks[stage, kind] = task
    return tasks


def compile_pair(
    program: Program, pair: tuple[int, int], submesh: Submesh, settled: Settled
) -> PartedTask:
    """Compile the F&B task of a pair in its parts; the ports of its halves say how its values are spread."""
    forward, backward = pair
    halves = ((backward, program.task(backward, "B")), (forward, program.task(forward, "F")))
    reads = [spread for stage, half in halves for spread in settled.given(stage, half)]
    gives = [settled.of(stage, port) for stage, half in halves for port in half.output_ports]
    parts, messages = cut_pair(program, pair)
    spread = dict(enumerate(reads))
    tasks = []
    for part in parts:
        made = range(len(spread), len(spread) + len(part.graph.outputs))
        ready = {place: gives[number] for number, place in part.outputs}
        task = compile_task(
            part.graph,
            submesh=submesh,
            reads=[spread[number] for number in part.operands],
            gives=[ready.get(place, settled.between) for place in made],
        )
        spread.update(zip(made, task.gives, strict=True))
        tasks.append(task)
    return PartedTask(parts, tuple(tasks), messages)
