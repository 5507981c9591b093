"""Have structurally equal tasks of a program share their values and equations.

    task 1 F graph @m.stage1.forward(%h, %w {param "layers.1.w"}) ...     one tuple of equations, two graphs that
    task 2 F graph @m.stage2.forward(%h, %w {param "layers.2.w"}) ...  -> differ in name and port names

Structure is op, attributes, types, order, and the roles of ports; names of ports do not count. That `graph.eqns is
other.eqns` then says that one compiled artifact serves both.
"""

from dataclasses import replace

from plait.core_ir.graph import Graph
from plait.core_ir.passes.structure import graph_digest
from plait.core_ir.program import Program, Stage


def deduplicate_stages(program: Program) -> Program:
    """The program in which equal tasks have the same inputs, equations and outputs."""
    first: dict[str, Graph] = {}

    def shared(graph: Graph) -> Graph:
        model = first.setdefault(graph_digest(graph), graph)
        if model is graph:
            return graph
        return replace(graph, inputs=model.inputs, eqns=model.eqns, outputs=model.outputs)

    stages = tuple(
        Stage(stage.index, {kind: shared(task) for kind, task in stage.tasks.items()})
        for stage in program.stages
    )
    return replace(program, stages=stages)
