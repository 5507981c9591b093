"""Remove equations that no output needs.

    graph @f(%x: f32[3]) -> (%y: f32[3]) {        graph @f(%x: f32[3]) -> (%y: f32[3]) {
      %y: f32[3] = neg(%x)                   ->     %y: f32[3] = neg(%x)
      %z: f32[3] = exp(%x)                        }
    }

Equations with an effect stay, and what they need. Inputs stay: they are the calling convention. Of a `barrier`, single
leaves are removed; not of a `boundary`, whose leaves are matched by position when a recomputation meets it again.
"""

from dataclasses import replace

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.control import barrier
from plait.core_ir.passes.equations import has_effect


def eliminate_dead_code(graph: Graph) -> Graph:
    """The graph with the equations that an output or an effect needs, in the same order."""
    live: set[Value] = set(graph.outputs)
    kept: list[Eqn] = []
    for eqn in reversed(graph.eqns):
        if not any(r in live for r in eqn.results) and not has_effect(eqn):
            continue
        eqn = _live_leaves(eqn, live) if eqn.op is barrier else eqn
        kept.append(eqn)
        live.update(eqn.operands)
    if len(kept) == len(graph.eqns) and all(
        a is b for a, b in zip(reversed(kept), graph.eqns, strict=True)
    ):
        return graph
    return replace(graph, eqns=tuple(reversed(kept)))


def _live_leaves(eqn: Eqn, live: set[Value]) -> Eqn:
    """A barrier over the operands whose results are read."""
    pairs = [(o, r) for o, r in zip(eqn.operands, eqn.results, strict=True) if r in live]
    if len(pairs) == len(eqn.results):
        return eqn
    operands, results = zip(*pairs, strict=True)
    return Eqn(eqn.op, operands, eqn.attrs, results, eqn.source)
