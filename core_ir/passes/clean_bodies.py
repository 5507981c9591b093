"""Clean the graphs inside control flow.

    scan(...) {body: x -> transpose(transpose(x))}   ->   scan(...) {body: x -> x}

A body's inputs and outputs stay as they are: their positions are what they mean.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.equations import nested_graphs
from plait.core_ir.passes.fold_constants import fold_constants
from plait.core_ir.passes.fold_exchanges import fold_exchanges
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.passes.merge_common_subexpressions import merge_common_subexpressions

BODY_PASSES: tuple[Callable[[Graph], Graph], ...] = (
    fold_constants,
    merge_common_subexpressions,
    fold_exchanges,
    fold_transposes,
    merge_common_subexpressions,
    eliminate_dead_code,
)


def clean_bodies(graph: Graph) -> Graph:
    """The graph with the graphs in its attributes cleaned, inner ones first."""
    if not any(True for eqn in graph.eqns for _ in nested_graphs(eqn)):
        return graph
    return replace(graph, eqns=tuple(map(_with_clean_bodies, graph.eqns)))


def _with_clean_bodies(eqn: Eqn) -> Eqn:
    if not any(True for _ in nested_graphs(eqn)):
        return eqn
    attrs = {name: _cleaned(value) for name, value in eqn.attrs.items()}
    return Eqn(eqn.op, eqn.operands, attrs, eqn.results, eqn.source)


def _cleaned(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_cleaned, value))
    if not isinstance(value, Graph):
        return value
    value = clean_bodies(value)
    for one in BODY_PASSES:
        value = one(value)
    return value
