"""Leave gradients of parameters as what each rank has of them, where a program sums every microbatch's over ranks.

    %h: async<f32[8, 8]> = all_reduce(%p) {axis="expert", reduction="sum", size=2}
    %s: f32[8, 8] = wait(%h)                                                        ->
    %g: f32[8, 8] = transpose(%s) {permutation=[1, 0]}                                  %g = transpose(%p) ...
    return %g {param_grad "w"}                                                          return %g {param_grad "w"}

A sum over ranks and a sum over microbatches may be taken in either order, and the second one first costs one
collective a step instead of one a microbatch. So a transposed `shard_map` of JAX, which sums the gradient of what all
ranks hold alike, becomes what data parallelism does by hand. Whoever adds up microbatches has to sum over these axes
then, once.
"""

from collections import Counter
from dataclasses import replace

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import all_reduce, wait
from plait.core_ir.ops.elementwise import add, neg
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.ops.shape import reshape, transpose

_LINEAR = frozenset({add, neg, reduce_sum, reshape, transpose})
"""Ops through which a sum over ranks can be moved."""

_NONE = frozenset[str]()


def defer_reductions(graph: Graph) -> tuple[Graph, dict[str, tuple[str, ...]]]:
    """The joint graph with such sums left out, and for each parameter that has one the axes to sum over."""
    summed = _summed(graph)
    found: dict[str, tuple[str, ...]] = {}
    wanted: set[Value] = set()
    for port, value in zip(graph.output_ports, graph.outputs, strict=True):
        if port.role == "param_grad" and value in summed:
            found[port.name] = tuple(sorted(summed[value]))
            wanted.add(value)
    if not found:
        return graph, {}
    for eqn in reversed(graph.eqns):  # what is summed, back to where it is
        if not wanted.isdisjoint(eqn.results):
            inside = (v for v in eqn.operands if eqn.op is not all_reduce or v in summed)
            wanted.update(inside)
    now: dict[Value, Value] = {}
    eqns = []
    for eqn in graph.eqns:
        operands = tuple(now.get(value, value) for value in eqn.operands)
        if wanted.isdisjoint(eqn.results):
            eqns.append(eqn)
        elif eqn.op in (all_reduce, wait):
            now[eqn.result] = operands[0]
        else:
            now[eqn.result] = Value(eqn.result.type, eqn.result.name)
            eqns.append(Eqn(eqn.op, operands, eqn.attrs, (now[eqn.result],), eqn.source))
    outputs = tuple(now.get(value, value) for value in graph.outputs)
    return replace(graph, eqns=tuple(eqns), outputs=outputs), found


def _summed(graph: Graph) -> dict[Value, frozenset[str]]:
    """The values that are sums over ranks, whichever way they are made, and the axes of these; each has one use."""
    uses = Counter(graph.outputs)
    for eqn in graph.eqns:
        uses.update(eqn.operands)
    found: dict[Value, frozenset[str]] = {}
    for eqn in graph.eqns:
        axes = _NONE
        if eqn.op is all_reduce and eqn.attrs["reduction"] == "sum":
            axes = found.get(eqn.operands[0], _NONE) | {eqn.attrs["axis"]}
        elif eqn.op is wait or eqn.op in _LINEAR:
            axes, *others = (found.get(value, _NONE) for value in eqn.operands)
            axes = axes if all(other == axes for other in others) else _NONE
        if axes and uses[eqn.result] == 1 and eqn.result.type.dtype.is_inexact:
            found[eqn.result] = axes
    return found
