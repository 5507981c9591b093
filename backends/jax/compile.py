"""Compiling one task: a graph becomes an executable of one submesh, shared by structurally equal graphs."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax

from plait.backends.jax.emit import emit
from plait.backends.jax.private import shape_struct
from plait.backends.jax.submesh import Spread, Spreads, Submesh
from plait.backends.parts import PartedTask, cut_pair
from plait.core_ir.graph import Graph
from plait.core_ir.passes.structure import graph_digest
from plait.core_ir.program import Program
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
    """

    graph: Graph
    submesh: Submesh
    compile_seconds: float
    executable: jax.stages.Compiled = field(repr=False)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        with jax.enable_x64(True):
            return list(self.executable(*arrays))


def compile_task(
    graph: Graph,
    *,
    submesh: Submesh | None = None,
    reads: Sequence[Spread] | None = None,
    gives: Sequence[Spread] | None = None,
) -> CompiledTask:
    """Compile a graph for one submesh (default: the first device), ahead of any call.

    reads, gives: how inputs and outputs are spread; by default not at all.

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
    return CompiledTask(graph, submesh, seconds, executable)


def compile_function(
    function: Callable[..., tuple[jax.Array, ...]],
    types: Sequence[TensorType],
    submesh: Submesh,
    reads: Sequence[Spread],
    gives: Sequence[Spread],
) -> jax.stages.Compiled:
    """Compile what each device of a submesh runs; types are those of a device's values."""
    with jax.enable_x64(True):
        wholes = [(submesh.type(t, s), s) for t, s in zip(types, reads, strict=True)]
        operands = [shape_struct(t.shape, t.dtype.numpy, submesh.sharding(s)) for t, s in wholes]
        # An input that nothing reads stays an input: callers pass all of them.
        jitted = jax.jit(
            submesh.over(function, reads, gives),
            keep_unused=True,
            out_shardings=tuple(map(submesh.sharding, gives)),
        )
        return jitted.lower(*operands).compile(compiler_options=COMPILER_OPTIONS)


def compile_of_stage(graph: Graph, submesh: Submesh, spreads: Spreads) -> CompiledTask:
    """Compile a task whose ports say how its values are spread."""
    reads = [spreads.of(port) for port in graph.input_ports]
    gives = [spreads.of(port) for port in graph.output_ports]
    return compile_task(graph, submesh=submesh, reads=reads, gives=gives)


def compile_pair(
    program: Program, pair: tuple[int, int], submesh: Submesh, spreads: Spreads
) -> PartedTask:
    """Compile the F&B task of a pair in its parts; the ports of its halves say how its values are spread."""
    forward, backward = pair
    halves = (program.task(backward, "B"), program.task(forward, "F"))
    reads = [spreads.of(port) for half in halves for port in half.input_ports]
    gives = [spreads.of(port) for half in halves for port in half.output_ports]
    parts, messages = cut_pair(program, pair)
    spread = dict(enumerate(reads))
    tasks = []
    for part in parts:
        made = range(len(spread), len(spread) + len(part.graph.outputs))
        ready = {place: gives[number] for number, place in part.outputs}
        spread.update((place, ready.get(place, spreads.by_device)) for place in made)
        task = compile_task(
            part.graph,
            submesh=submesh,
            reads=[spread[number] for number in part.operands],
            gives=[spread[number] for number in made],
        )
        tasks.append(task)
    return PartedTask(parts, tuple(tasks), messages)
