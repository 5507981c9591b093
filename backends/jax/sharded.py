"""Sharded parameters over the submeshes of a mesh: how they lie, and the tasks that gather and reduce them.

The user's arrays are whole. What a submesh holds ends with rows of zeros where rows do not come out even; these go in
where a step begins, and come off where it ends.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.backends.jax.arrays import JaxArrays
from plait.backends.jax.compile import compile_task
from plait.backends.jax.submesh import Spreads, Submesh
from plait.backends.runtime import Begin
from plait.core_ir.graph import Graph
from plait.core_ir.program import STEP_KINDS, Program, TaskKind


class Sharded:
    """The sharded parameters of a program on a mesh."""

    def __init__(self, program: Program, spreads: Spreads) -> None:
        self._types = {
            name: (program.param_types[name].shape[0], shard.shape[0])
            for name, shard in program.shard_types.items()
        }
        self._spreads = spreads
        _, self._size = program.shard_axis or ("", 1)

    def padded(self, name: str, array: Any) -> Any:
        """The whole array of a parameter as its shards make it up; an array of NumPy or of JAX."""
        if name not in self._types or not self._missing(name):
            return array
        rows, _ = self._types[name]
        by_part = array.reshape(self._num_parts(name), rows, *array.shape[1:])
        widths = [(0, 0), (0, self._missing(name)), *[(0, 0)] * (array.ndim - 1)]
        filled = (jnp if isinstance(array, jax.Array) else np).pad(by_part, widths)
        return filled.reshape(-1, *array.shape[1:])

    def unpadded(self, name: str, array: jax.Array) -> jax.Array:
        """What was filled up without what fills it up."""
        if name not in self._types or not self._missing(name):
            return array
        rows, _ = self._types[name]
        by_part = array.reshape(self._num_parts(name), -1, *array.shape[1:])
        return by_part[:, :rows].reshape(-1, *array.shape[1:])

    def _missing(self, name: str) -> int:
        rows, chunk = self._types[name]
        return self._size * chunk - rows

    def _num_parts(self, name: str) -> int:
        """Into how many parts, each of which is then sharded, other axes cut dim 0."""
        layout, mesh = self._spreads.layout(name), self._spreads.mesh
        if mesh is None or not layout:
            return 1
        return math.prod(mesh.axes[axis] for axis in layout[0])


def step_tasks(
    program: Program, submeshes: Sequence[Submesh], spreads: Spreads
) -> dict[tuple[int, TaskKind], Begin]:
    """UNSHARD and REDUCE_GRAD of all stages. To call one is to dispatch it."""
    arrays = JaxArrays(submeshes, spreads)
    return {
        (stage.index, kind): _dispatched(stage.tasks[kind], stage.index, submeshes, spreads, arrays)
        for stage in program.stages
        for kind in STEP_KINDS
        if kind in stage.tasks
    }


def _dispatched(
    graph: Graph, stage: int, submeshes: Sequence[Submesh], spreads: Spreads, arrays: JaxArrays
) -> Begin:
    reads = [spreads.of(port) for port in graph.input_ports]
    gives = [spreads.of(port) for port in graph.output_ports]
    task = compile_task(graph, submesh=submeshes[stage], reads=reads, gives=gives)

    def begin(operands: Sequence[jax.Array]) -> Callable[[], Sequence[jax.Array]]:
        if spreads.has_auto:  # sums of gradients may lie as the compiler chose
            pairs = zip(operands, reads, strict=True)
            operands = [arrays.put(x, stage, spread) for x, spread in pairs]
        made = task(operands)
        return lambda: made

    return begin
