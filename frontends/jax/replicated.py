"""Reductions over axes along which ranks hold the same.

    %y = wait(all_reduce(%x) {axis="model", reduction="sum", size=4})   ->   %y = mul(%x, 4)

where `%x` is the same on all ranks of the axis. JAX derives such sums where it does not track what varies along which
axis (`check_vma=False`): over every axis of the user's mesh, that of the stages and of the data among them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.mesh import Layout, axes_of
from plait.core_ir.ops import collective, control, elementwise
from plait.core_ir.passes.equations import collective_axes
from plait.core_ir.passes.varying import NOWHERE, Axes, given_inside, varying


def reduce_locally(graph: Graph, layouts: Mapping[str, Layout]) -> Graph:
    """The joint graph without reductions over axes along which their operand does not vary.

    layouts: of the parameters that are cut; all other inputs are the same on all ranks.
    """
    if not collective_axes(graph):
        return graph
    given = [
        frozenset(axes_of(layouts.get(port.name, ()))) if port.role == "param" else NOWHERE
        for port in graph.input_ports
    ]
    return _rewritten(graph, given)


def _rewritten(graph: Graph, given: Sequence[Axes]) -> Graph:
    b = Builder(graph.name)
    found = varying(graph, given)
    new: dict[Value, Value] = {}
    for value, port in zip(graph.inputs, graph.input_ports, strict=True):
        new[value] = b.input(value.type, port.role, port.name)
    for eqn in graph.eqns:
        operands = [new[x] for x in eqn.operands]
        with b.at(eqn.source):
            results = _equation(b, eqn, operands, [found[x] for x in eqn.operands])
        new.update(zip(eqn.results, results, strict=True))
    for value, port in zip(graph.outputs, graph.output_ports, strict=True):
        b.output(new[value], port.role, port.name)
    return b.build()


def _equation(
    b: Builder, eqn: Eqn, operands: Sequence[Value], axes: Sequence[Axes]
) -> Sequence[Value]:
    """What stands for an equation, given its new operands and how its operands vary."""
    if eqn.op is collective.all_reduce and eqn.attrs["axis"] not in axes[0]:
        if eqn.attrs["reduction"] == "sum":
            (x,) = operands
            return [b(elementwise.mul, x, b.full(x.type, eqn.attrs["size"]))]
        if eqn.attrs["reduction"] != "product":
            return operands
    if eqn.op is collective.wait and operands[0].type == eqn.result.type:
        return operands  # what was started became local
    given = given_inside(eqn, axes)
    if eqn.op is control.cond:
        branches = tuple(map(_rewritten, eqn.attrs["branches"], given))
        return _same(b, eqn, operands, branches=branches)
    if eqn.op is control.scan:
        return _same(b, eqn, operands, body=_rewritten(eqn.attrs["body"], given[0]))
    return _same(b, eqn, operands)


def _same(b: Builder, eqn: Eqn, operands: Sequence[Value], **attrs: Any) -> Sequence[Value]:
    """The equation on other operands, with other attributes where given."""
    results = tuple(Value(x.type) for x in eqn.results)
    b.append(Eqn(eqn.op, tuple(operands), {**eqn.attrs, **attrs}, results, eqn.source))
    return results
