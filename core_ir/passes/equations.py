"""What passes ask of single equations: nested graphs, effects, kinds of op."""

from collections.abc import Iterable, Iterator, Sequence

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.op import Op
from plait.core_ir.ops.collective import STARTS, wait
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


COMMUNICATION: frozenset[Op] = frozenset({*STARTS, wait})
"""The effects that ranks of a group have together: all of them run the same tasks, so any task may hold them."""


def collective_axes(graph: Graph) -> dict[str, int]:
    """The mesh axes that a graph's collectives name, in graphs of attributes too, with their sizes."""
    axes: dict[str, int] = {}
    for eqn in graph.eqns:
        if eqn.op.evaluate_ranks is not None:
            axes[eqn.attrs["axis"]] = eqn.attrs["size"]
        for nested in nested_graphs(eqn):
            axes.update(collective_axes(nested))
    return axes


def has_effect(eqn: Eqn) -> bool:
    """Whether an equation must run exactly once, in order: by its op, its `effect` attribute, or one inside it."""
    if eqn.op.effect or eqn.attrs.get("effect", False):
        return True
    return any(has_effect(inner) for graph in nested_graphs(eqn) for inner in graph.eqns)


def pinned_equations(eqns: Sequence[Eqn], outputs: Iterable[Value]) -> set[Eqn]:
    """The equations that run though no output needs them: effects, and waits for what nothing reads.

    Other communication stands where its results are needed, a start with its wait.
    """
    needed = set(outputs)
    pinned: set[Eqn] = set()
    for eqn in reversed(eqns):
        is_needed = any(r in needed for r in eqn.results)
        if has_effect(eqn) and not (is_needed and _only_communicates(eqn)):
            pinned.add(eqn)
            is_needed = True
        if is_needed:
            needed.update(eqn.operands)
    return pinned


def _only_communicates(eqn: Eqn) -> bool:
    if eqn.op in COMMUNICATION or not has_effect(eqn):
        return True
    inside = [inner for graph in nested_graphs(eqn) for inner in graph.eqns]
    return bool(inside) and all(map(_only_communicates, inside))
