"""Compiling one task: a graph becomes an executable of one device, shared by structurally equal graphs."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import SingleDeviceSharding

from plait.backends.jax.emit import emit
from plait.backends.jax.private import shape_struct
from plait.core_ir.graph import Graph
from plait.core_ir.passes.structure import graph_digest

COMPILER_OPTIONS: dict[str, str | bool] = {"xla_allow_excess_precision": False}
"""A conversion to a narrower dtype rounds, as the op says, even where it is converted back at once."""

_MOST_KEPT = 512
_artifacts: OrderedDict[tuple[str, jax.Device], jax.stages.Compiled] = OrderedDict()
"""Executables of this process by structure and device, the latest used last."""


@dataclass(frozen=True)
class CompiledTask:
    """A task as a function of arrays on its device, one for each input; gives those of its outputs.

    No array that it is given is donated or changed.

    Attributes
    ----------
    compile_seconds: what compiling took now; 0.0 where an artifact of an equal graph was there.
    """

    graph: Graph
    device: jax.Device
    compile_seconds: float
    executable: jax.stages.Compiled = field(repr=False)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        with jax.enable_x64(True):
            return list(self.executable(*arrays))


def compile_task(graph: Graph, *, device: jax.Device | None = None) -> CompiledTask:
    """Compile a graph for one device (default: the first), ahead of any call.

    Raises UnsupportedError where an equation cannot be emitted, with the user's line.
    """
    device = jax.devices()[0] if device is None else device
    key = (graph_digest(graph), device)
    start = time.perf_counter()
    executable = _artifacts.pop(key, None)
    seconds = 0.0
    if executable is None:
        executable = _compile(graph, device)
        seconds = time.perf_counter() - start
    _artifacts[key] = executable
    if len(_artifacts) > _MOST_KEPT:
        _artifacts.popitem(last=False)
    return CompiledTask(graph, device, seconds, executable)


def _compile(graph: Graph, device: jax.Device) -> jax.stages.Compiled:
    sharding = SingleDeviceSharding(device)
    with jax.enable_x64(True):
        operands = [shape_struct(t.shape, t.dtype.numpy, sharding) for t in graph.input_types]
        # An input that no equation reads stays an input: callers pass all of them.
        jitted = jax.jit(emit(graph), keep_unused=True, out_shardings=sharding)
        return jitted.lower(*operands).compile(compiler_options=COMPILER_OPTIONS)
