"""From a joint program to the tasks of a pipeline: the passes in their order, on one page."""

from plait.core_ir.graph import Graph
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.split_backward import split_backward
from plait.core_ir.program import Program


def build_program(graph: Graph, num_stages: int) -> Program:
    """Stages with their tasks from a joint program with markers."""
    return split_backward(
        partition_stages(eliminate_dead_code(graph), num_stages, name=graph.name)
    )
