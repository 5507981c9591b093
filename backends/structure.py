"""A graph without its names: what is left is its structure, so that equal tasks share one artifact."""

from typing import Any

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.text import print_graph


def structure(graph: Graph) -> str:
    """Text that is equal for two graphs exactly when they compute the same of inputs in one order.

    Names of the graph, its values and its ports do not count, nor where the user wrote the equations; large constants
    count by the hash of their content.
    """
    return print_graph(_anonymous(graph), header=False)


def _anonymous(graph: Graph) -> Graph:
    fresh = {v: Value(v.type) for v in graph.inputs}
    eqns = []
    for eqn in graph.eqns:
        operands = tuple(fresh[v] for v in eqn.operands)
        results = tuple(Value(v.type) for v in eqn.results)
        fresh.update(zip(eqn.results, results, strict=True))
        attrs = {name: _without_names(value) for name, value in eqn.attrs.items()}
        eqns.append(Eqn(eqn.op, operands, attrs, results))
    inputs = tuple(fresh[v] for v in graph.inputs)
    return Graph("", inputs, tuple(eqns), tuple(fresh[v] for v in graph.outputs))


def _without_names(value: Any) -> Any:
    if isinstance(value, Graph):
        return _anonymous(value)
    if isinstance(value, tuple):
        return tuple(_without_names(v) for v in value)
    return value
