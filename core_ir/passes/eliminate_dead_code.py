"""Remove equations that no output needs.

    graph @f(%x: f32[3]) -> (%y: f32[3]) {        graph @f(%x: f32[3]) -> (%y: f32[3]) {
      %y: f32[3] = neg(%x)                   ->     %y: f32[3] = neg(%x)
      %z: f32[3] = exp(%x)                        }
    }

Equations with an effect stay, and what they need. Inputs stay: they are the calling convention. Of a `barrier` single
leaves are removed, of a `scan` single results with what only they need; not of a `boundary`, whose leaves are matched
by position when a recomputation meets it again.
"""

from dataclasses import replace

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.control import barrier, scan
from plait.core_ir.passes.equations import has_effect
from plait.core_ir.passes.scans import Scan, closure, rebuild_scan, with_carries


def eliminate_dead_code(graph: Graph) -> Graph:
    """The graph with the equations that an output or an effect needs, in the same order."""
    live: set[Value] = set(graph.outputs)
    kept: list[Eqn] = []
    for eqn in reversed(graph.eqns):
        if not any(r in live for r in eqn.results) and not has_effect(eqn):
            continue
        if eqn.op is barrier:
            eqn = _live_leaves(eqn, live)
        elif eqn.op is scan:
            eqn = _live_results(eqn, live)
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


def _live_results(eqn: Eqn, live: set[Value]) -> Eqn:
    """A scan of the results that are read, and the carries that they need."""
    whole, body = Scan(eqn), eqn.attrs["body"]
    outputs = with_carries(whole, (i for i, r in enumerate(eqn.results) if r in live))
    needed = closure(body, (body.outputs[i] for i in outputs))
    is_all = len(outputs) == len(eqn.results) and len(needed) == len(body.eqns)
    if is_all or has_effect(eqn):
        return eqn
    return rebuild_scan(whole, [e for e in body.eqns if e in needed], sorted(outputs))
