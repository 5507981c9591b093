"""Compute equal values once, and put operands of commutative ops in one order.

    %a: f32[3] = exp(%x)             %a: f32[3] = exp(%x)
    %b: f32[3] = exp(%x)        ->   %c: f32[3] = add(%a, %a)
    %c: f32[3] = add(%b, %a)

Equations with an effect are never merged, barriers neither: what is computed behind one reads other values than what
is computed before it, and so stays apart. Random ops are pure and do merge. The order of commutative operands follows
from how they are made, not from their names, so that equal programs of two frontends come out equal.
"""

from dataclasses import replace
from typing import TypeAlias

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.control import barrier
from plait.core_ir.passes.equations import has_effect
from plait.core_ir.passes.structure import ValueKeys, op_key

_Key: TypeAlias = tuple[str, tuple[Value, ...]]


def merge_common_subexpressions(graph: Graph) -> Graph:
    """The graph with each distinct pure equation once."""
    keys = ValueKeys(graph)
    same: dict[Value, Value] = {}
    first: dict[_Key, Eqn] = {}
    kept: list[Eqn] = []
    for original in graph.eqns:
        operands = [same.get(o, o) for o in original.operands]
        if original.op.commutative:
            operands.sort(key=keys.order)
        eqn = original.with_operands(operands)
        if eqn.op is not barrier and not has_effect(eqn):
            before = first.setdefault((op_key(eqn), eqn.operands), eqn)
            if before is not eqn:
                same.update(zip(eqn.results, before.results, strict=True))
                continue
        keys.add(eqn)
        kept.append(eqn)
    if all(a is b for a, b in zip(kept, graph.eqns, strict=False)) and len(kept) == len(graph.eqns):
        return graph
    outputs = tuple(same.get(v, v) for v in graph.outputs)
    return replace(graph, eqns=tuple(kept), outputs=outputs)
