"""The runtime on NumPy arrays: tasks are interpreted, so that engines have an independent oracle."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.backends.runtime import Plan, Task, task_graphs
from plait.core_ir.graph import Graph
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Array
from plait.core_ir.program import Program
from plait.core_ir.types import TensorType


class NumpyArrays:
    """NumPy arrays as the runtime handles them."""

    def zeros(self, type: TensorType, stage: int) -> Array:
        return np.zeros(type.shape, type.dtype.numpy)

    def scalar(self, number: float, type: TensorType, stage: int) -> Array:
        return np.full(type.shape, number, type.dtype.numpy)

    def key(self, words: Array, stage: int) -> Array:
        return words

    def add(self, total: Array, part: Array) -> Array:
        return np.asarray(total + part)

    def move(self, array: Any, stage: int) -> Array:
        return np.asarray(array)

    def stack(self, parts: Sequence[Array]) -> Array:
        return np.stack(parts)


def numpy_plan(program: Program) -> Plan:
    """A plan of all stages whose tasks are interpreted."""
    stages = tuple(range(program.num_stages))
    tasks = {(stage, kind): _task(graph) for stage, kind, graph in task_graphs(program, stages)}
    return Plan(program, stages, tasks, NumpyArrays())


def _task(graph: Graph) -> Task:
    def run(operands: list[Any]) -> list[Array]:
        outputs = interpret(graph, operands)
        operands.clear()  # as compiled tasks do, so that what is read later must have been kept
        return outputs

    return run
