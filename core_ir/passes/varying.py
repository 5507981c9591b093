"""Along which axes of a mesh a value may differ from rank to rank: after a sum over an axis it is the same along it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops import collective, control
from plait.core_ir.passes.equations import collective_axes, nested_graphs

Axes: TypeAlias = frozenset[str]

NOWHERE: Axes = frozenset()
"""Of a value that is the same on all ranks."""


def varying(graph: Graph, given: Sequence[Axes]) -> dict[Value, Axes]:
    """The axes along which each value of a graph may differ; `given` says it of the inputs."""
    found = dict(zip(graph.inputs, given, strict=True))
    for eqn in graph.eqns:
        results = _RULES.get(eqn.op.name, _other)(eqn, [found[x] for x in eqn.operands])
        found.update(zip(eqn.results, results, strict=True))
    return found


def given_inside(eqn: Eqn, axes: Sequence[Axes]) -> list[list[Axes]]:
    """How the inputs of the graphs in a `cond` or a `scan` vary, for operands that vary so. Other ops have none."""
    if eqn.op is control.cond:
        return [list(axes[1:]) for _ in nested_graphs(eqn)]
    if eqn.op is control.scan:
        return [_given_each_time(eqn, axes)]
    return []


def _given_each_time(eqn: Eqn, axes: Sequence[Axes]) -> list[Axes]:
    """With what the carry comes to vary along after some turns."""
    first, last = eqn.attrs["num_consts"], eqn.attrs["num_consts"] + eqn.attrs["num_carry"]
    given = list(axes)
    while True:
        found = _outputs(eqn.attrs["body"], given)
        carry = [a | b for a, b in zip(given[first:last], found, strict=False)]
        if carry == given[first:last]:
            return given
        given[first:last] = carry


def _outputs(graph: Graph, given: Sequence[Axes]) -> list[Axes]:
    found = varying(graph, given)
    return [found[value] for value in graph.outputs]


_Rule: TypeAlias = Callable[[Eqn, Sequence[Axes]], Sequence[Axes]]
"""`(equation, how its operands vary) -> how its results vary`."""


def _other(eqn: Eqn, axes: Sequence[Axes]) -> Sequence[Axes]:
    """Anything else; graphs inside are not looked into: results vary wherever something in them does."""
    found = NOWHERE.union(*axes, *(frozenset(collective_axes(g)) for g in nested_graphs(eqn)))
    return [found] * len(eqn.results)


def _axis_index(eqn: Eqn, axes: Sequence[Axes]) -> Sequence[Axes]:
    return [frozenset({eqn.attrs["axis"]})]


def _apart(eqn: Eqn, axes: Sequence[Axes]) -> Sequence[Axes]:
    """What gives each rank something else."""
    return [axes[0] | {eqn.attrs["axis"]}]


def _alike(eqn: Eqn, axes: Sequence[Axes]) -> Sequence[Axes]:
    """What gives all ranks the same."""
    return [axes[0] - {eqn.attrs["axis"]}]


def _cond(eqn: Eqn, axes: Sequence[Axes]) -> Sequence[Axes]:
    of_branches = map(_outputs, nested_graphs(eqn), given_inside(eqn, axes))
    return [axes[0].union(*outputs) for outputs in zip(*of_branches, strict=True)]


def _scan(eqn: Eqn, axes: Sequence[Axes]) -> Sequence[Axes]:
    given = _given_each_time(eqn, axes)
    found = _outputs(eqn.attrs["body"], given)
    if eqn.attrs["length"] == 0:  # the carry stays as it was given
        first, num = eqn.attrs["num_consts"], eqn.attrs["num_carry"]
        found[:num] = axes[first : first + num]
    return found


_RULES: Mapping[str, _Rule] = {
    collective.axis_index.name: _axis_index,
    collective.all_gather.name: _alike,
    collective.all_reduce.name: _alike,
    collective.reduce_scatter.name: _apart,
    collective.all_to_all.name: _apart,
    collective.permute.name: _apart,
    control.cond.name: _cond,
    control.scan.name: _scan,
}
