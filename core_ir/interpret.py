"""The meaning of a graph in NumPy: the oracle both backends are compared with. Clear, not fast."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from plait.core_ir.errors import ExecutionError, PlaitError
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.op import Array, Run
from plait.core_ir.types import AsyncType, type_of

Evaluate: TypeAlias = Callable[[Eqn, Sequence[Array], Run], Sequence[Array]]
"""`evaluate(eqn, operands, run) -> results` of one equation; `run` interprets the graphs in its attributes."""


def interpret(graph: Graph, operands: Sequence[Array]) -> list[Array]:
    """Run a graph on NumPy arrays, one for each input, in order; the outputs, in order.

    Raises ExecutionError where an operand does not have its input's type, and at a collective of more ranks than one,
    which `interpret_ranks` runs.
    """
    return interpret_with(_by_meaning, graph, operands)


def _by_meaning(eqn: Eqn, operands: Sequence[Array], run: Run) -> Sequence[Array]:
    return eqn.op.evaluate(operands, eqn.attrs, run)


def interpret_with(evaluate: Evaluate, graph: Graph, operands: Sequence[Array]) -> list[Array]:
    """As `interpret`, with the results of each equation by `evaluate`."""
    if len(operands) != len(graph.inputs):
        raise ExecutionError(
            f"graph {graph.name}: expected {len(graph.inputs)} operands, got {len(operands)}"
        )
    known: dict[Value, Array] = {}
    for value, port, array in zip(graph.inputs, graph.input_ports, operands, strict=True):
        if type_of(array) != value.type:
            raise ExecutionError(
                f"graph {graph.name}: input {port} has type {value.type}, got {type_of(array)}"
            )
        known[value] = array
    run = partial(interpret_with, evaluate)
    for eqn in graph.eqns:
        try:
            results = evaluate(eqn, [known[v] for v in eqn.operands], run)
        except PlaitError:
            raise
        except Exception as error:
            error.add_note(f"while interpreting {eqn.op.name} of {graph.name} ({eqn.source})")
            raise
        for value, array in zip(eqn.results, results, strict=True):
            # What is under way stands as the array to come.
            expected = value.type.type if isinstance(value.type, AsyncType) else value.type
            if type_of(array) != expected:
                raise ExecutionError(
                    f"{eqn.op.name}: its meaning gave {type_of(array)} where its type rule says {value.type}"
                )
            known[value] = array
    return [known[v] for v in graph.outputs]


def interpret_by_name(
    graph: Graph, operands: Mapping[tuple[str, str], Array]
) -> dict[tuple[str, str], Array]:
    """Run a graph with operands by `(role, name)` of its input ports; outputs likewise."""
    arrays = [operands[(p.role, p.name)] for p in graph.input_ports]
    outputs = interpret(graph, arrays)
    return {(p.role, p.name): out for p, out in zip(graph.output_ports, outputs, strict=True)}
