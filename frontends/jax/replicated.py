"""Reductions over axes along which ranks hold the same.

    %y = wait(all_reduce(%x) {axis="model", reduction="sum", size=4})   ->   %y = mul(%x, 4)

where `%x` is the same on all ranks of the axis. JAX derives such sums where it does not track what varies along which
axis (`check_vma=False`): over every axis of the user's mesh, that of the stages and of the data among them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.mesh import Layout, axes_of
from plait.core_ir.ops import collective, control, elementwise
from plait.core_ir.passes.equations import collective_axes, nested_graphs

Axes: TypeAlias = frozenset[str]
"""The axes along which a value may differ from rank to rank."""

_NOWHERE: Axes = frozenset()


def reduce_locally(graph: Graph, layouts: Mapping[str, Layout]) -> Graph:
    """The joint graph without reductions over axes along which their operand does not vary.

    layouts: of the parameters that are cut; all other inputs are the same on all ranks.
    """
    if not collective_axes(graph):
        return graph
    given = [
        frozenset(axes_of(layouts.get(port.name, ()))) if port.role == "param" else _NOWHERE
        for port in graph.input_ports
    ]
    return _rewritten(graph, given)[0]


def _rewritten(graph: Graph, given: Sequence[Axes]) -> tuple[Graph, list[Axes]]:
    """The graph, for inputs that vary so, and how its outputs vary."""
    b = Builder(graph.name)
    new: dict[Value, Value] = {}
    varying: dict[Value, Axes] = {}
    for value, port, where in zip(graph.inputs, graph.input_ports, given, strict=True):
        new[value] = b.input(value.type, port.role, port.name)
        varying[value] = where
    for eqn in graph.eqns:
        operands = [new[x] for x in eqn.operands]
        axes = [varying[x] for x in eqn.operands]
        with b.at(eqn.source):
            results, found = _RULES.get(eqn.op.name, _other)(b, eqn, operands, axes)
        new.update(zip(eqn.results, results, strict=True))
        varying.update(zip(eqn.results, found, strict=True))
    for value, port in zip(graph.outputs, graph.output_ports, strict=True):
        b.output(new[value], port.role, port.name)
    return b.build(), [varying[value] for value in graph.outputs]


_Rewritten: TypeAlias = tuple[Sequence[Value], Sequence[Axes]]
_Rule: TypeAlias = Callable[[Builder, Eqn, Sequence[Value], Sequence[Axes]], _Rewritten]
"""`(builder, equation, its new operands, how they vary) -> its new results, how they vary`."""


def _other(b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]) -> _Rewritten:
    """Anything else; graphs inside are left alone, and vary wherever something in them does."""
    found = _NOWHERE.union(*axes, *(frozenset(collective_axes(g)) for g in nested_graphs(eqn)))
    results = _same(b, eqn, operands)
    return results, [found] * len(results)


def _same(b: Builder, eqn: Eqn, operands: Sequence[Value], **attrs: Any) -> Sequence[Value]:
    """The equation on other operands, with other attributes where given."""
    results = tuple(Value(x.type) for x in eqn.results)
    b.append(Eqn(eqn.op, tuple(operands), {**eqn.attrs, **attrs}, results, eqn.source))
    return results


def _axis_index(
    b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]
) -> _Rewritten:
    return _same(b, eqn, operands), [frozenset({eqn.attrs["axis"]})]


def _spread(b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]) -> _Rewritten:
    """What gives each rank something else."""
    return _same(b, eqn, operands), [axes[0] | {eqn.attrs["axis"]}]


def _all_gather(
    b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]
) -> _Rewritten:
    return _same(b, eqn, operands), [axes[0] - {eqn.attrs["axis"]}]


def _all_reduce(
    b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]
) -> _Rewritten:
    (x,), (varying,) = operands, axes
    axis, reduction = eqn.attrs["axis"], eqn.attrs["reduction"]
    if axis in varying or reduction == "product":
        return _all_gather(b, eqn, operands, axes)
    if reduction == "sum":
        x = b(elementwise.mul, x, b.full(x.type, eqn.attrs["size"]))
    return [x], [varying]


def _wait(b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]) -> _Rewritten:
    (x,) = operands
    if x.type == eqn.result.type:  # what was started became local
        return [x], axes
    return _same(b, eqn, operands), axes


def _cond(b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]) -> _Rewritten:
    branches = [_rewritten(branch, axes[1:]) for branch in eqn.attrs["branches"]]
    results = _same(b, eqn, operands, branches=tuple(graph for graph, _ in branches))
    found = zip(*(outputs for _, outputs in branches), strict=True)
    return results, [axes[0].union(*outputs) for outputs in found]


def _scan(b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]) -> _Rewritten:
    first, last = eqn.attrs["num_consts"], eqn.attrs["num_consts"] + eqn.attrs["num_carry"]
    given = list(axes)
    while True:
        body, found = _rewritten(eqn.attrs["body"], given)
        carry = [a | b for a, b in zip(given[first:last], found, strict=False)]
        if carry == given[first:last]:
            return _same(b, eqn, operands, body=body), found
        given[first:last] = carry


_RULES: Mapping[str, _Rule] = {
    collective.axis_index.name: _axis_index,
    collective.all_gather.name: _all_gather,
    collective.all_reduce.name: _all_reduce,
    collective.wait.name: _wait,
    **{
        op.name: _spread
        for op in (collective.reduce_scatter, collective.all_to_all, collective.permute)
    },
    control.cond.name: _cond,
    control.scan.name: _scan,
}
