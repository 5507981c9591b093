"""What passes ask of single equations: nested graphs, effects, kinds of op."""

from collections.abc import Iterator

from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.op import Op
from plait.core_ir.ops.shape import broadcast, constant, iota, reshape, slice_, transpose

VIEWS: frozenset[Op] = frozenset({constant, iota, reshape, transpose, broadcast, slice_})
"""Ops that compilers fold into whatever reads their result: computing them again costs nothing."""


def nested_graphs(eqn: Eqn) -> Iterator[Graph]:
    """The graphs an equation holds in its attributes."""
    for attr in eqn.attrs.values():
        if isinstance(attr, Graph):
            yield attr
        elif isinstance(attr, tuple):
            yield from (item for item in attr if isinstance(item, Graph))


def has_effect(eqn: Eqn) -> bool:
    """Whether an equation must run exactly once, in order: by its op, its `effect` attribute, or one inside it."""
    if eqn.op.effect or eqn.attrs.get("effect", False):
        return True
    return any(has_effect(inner) for graph in nested_graphs(eqn) for inner in graph.eqns)
