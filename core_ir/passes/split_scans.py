"""Split scans of a backward that make input and weight gradients together.

    %dx, %dw = scan(%dy, %xs, %ws) {body: d -> d w^T; x, d -> x^T d}
                       ->
    %dx, %ds = scan(%dy, %ws)      {body: d -> d w^T; stacks each d}
    %dw      = scan(%xs, %ds)      {body: x, d -> x^T d}

The first scan keeps what its wanted results need, from one step to the next too, and products that it computes again
from forward values; it stacks the values of each step that the rest reads. The second does the rest, with the carries
that only sum. Steps run in the same order in both. A scan stays whole when its rest has nothing costly, or when it has
an effect that is no communication, or communication that nothing needs.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from plait.core_ir.cost import eqn_flops
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.control import scan
from plait.core_ir.passes.equations import pinned_equations
from plait.core_ir.passes.recompute import is_view
from plait.core_ir.passes.recomputed_products import dependents, recomputed_products
from plait.core_ir.passes.scans import (
    Scan,
    carries_read,
    closure,
    inputs_read,
    rebuild_scan,
    with_carries,
)


def split_scans(
    graph: Graph, wanted: Iterable[Value], gradients: Collection[Value]
) -> tuple[Graph, set[Eqn]]:
    """The graph in which each scan is split where it can be, and the second scans.

    wanted: values that the first scans must give, such as the gradients that leave a stage. gradients: the values that
    are not made of forward values alone.
    """
    if not any(eqn.op is scan for eqn in graph.eqns):
        return graph, set()
    needed = set(wanted)
    for eqn in reversed(graph.eqns):
        if any(r in needed for r in eqn.results):
            needed.update(eqn.operands)
    read = {o for eqn in graph.eqns for o in eqn.operands}.union(graph.outputs)
    eqns: list[Eqn] = []
    second: set[Eqn] = set()
    for eqn in graph.eqns:
        parts = _split(Scan(eqn), needed, read, gradients) if eqn.op is scan else None
        eqns.extend(parts or (eqn,))
        second.update(parts[1:] if parts else ())
    return replace(graph, eqns=tuple(eqns)), second


def _split(
    whole: Scan, needed: set[Value], live: set[Value], gradients: Collection[Value]
) -> tuple[Eqn, Eqn] | None:
    body, results = whole.body, whole.eqn.results
    again = recomputed_products(body.eqns, _gradients_inside(whole, gradients))
    first_values = {r for e in again for r in e.results}
    first_outputs = _first_outputs(whole, needed, first_values)
    first_values.update(body.outputs[i] for i in first_outputs)
    first_eqns = closure(body, first_values)
    made = {r for e in first_eqns for r in e.results}
    first_outputs |= {i for i, v in enumerate(body.outputs) if i >= whole.num_carry and v in made}
    rest_outputs = [i for i, r in enumerate(results) if i not in first_outputs and r in live]
    rest_eqns = closure(body, (body.outputs[i] for i in rest_outputs)) - first_eqns
    costly = any(eqn_flops(e) > sum(r.type.size for r in e.results) for e in rest_eqns)
    kept = [v for i, v in enumerate(body.outputs) if i in first_outputs or i in rest_outputs]
    if not costly or pinned_equations(body.eqns, kept):
        return None

    views = _views_again(body, first_eqns, _read(rest_eqns, body, rest_outputs))
    rest = [e for e in body.eqns if e in rest_eqns or e in views]
    made = {r for e in rest for r in e.results}
    carried = {body.inputs[whole.num_consts + i] for i in first_outputs if i < whole.num_carry}
    passed = [
        v
        for v in _read(rest, body, rest_outputs)
        if v not in made and (v in carried or v not in body.inputs)
    ]
    stacks = {body.outputs[i]: results[i] for i in first_outputs if i >= whole.num_carry}
    stacked = [v for v in passed if v not in stacks]
    outputs = sorted(first_outputs)
    first = rebuild_scan(whole, [e for e in body.eqns if e in first_eqns], outputs, stacked)
    stacks.update(zip(stacked, first.results[len(outputs) :], strict=True))
    return first, rebuild_scan(whole, rest, rest_outputs, stacks={v: stacks[v] for v in passed})


def _read(eqns: Iterable[Eqn], body: Graph, outputs: Iterable[int]) -> list[Value]:
    """What equations and outputs of a body read, each value once."""
    eqns = set(eqns)
    read = [o for e in body.eqns if e in eqns for o in e.operands]
    return list(dict.fromkeys([*read, *(body.outputs[i] for i in outputs)]))


def _gradients_inside(whole: Scan, gradients: Collection[Value]) -> set[Value]:
    """The values of the body that depend on gradients, at this step or through a carry."""
    body = whole.body
    found = {v for v, o in zip(body.inputs, whole.eqn.operands, strict=True) if o in gradients}
    carries = body.inputs[whole.num_consts :][: whole.num_carry]
    while True:
        found = dependents(body.eqns, found)
        late = {v for v, after in zip(carries, body.outputs, strict=False) if after in found}
        if late <= found:
            return found
        found |= late


def _first_outputs(whole: Scan, needed: set[Value], inside: Iterable[Value]) -> set[int]:
    """The outputs of the body that the first scan gives: of wanted results, and carries that it needs each step.

    inside: values of the body that the first scan computes.

    A carry that other outputs read is wanted too: the chain of steps stays in the first scan.
    """
    body = whole.body
    outputs = {i for i, r in enumerate(whole.eqn.results) if r in needed}
    for i, carry in enumerate(body.inputs[whole.num_consts :][: whole.num_carry]):
        others = [v for j, v in enumerate(body.outputs) if j != i]
        if carry in inputs_read(body, others):
            outputs.add(i)
    return with_carries(whole, outputs | carries_read(whole, inside))


def _views_again(body: Graph, first_eqns: set[Eqn], read: Iterable[Value]) -> set[Eqn]:
    """The views of inputs and constants that the second scan computes again rather than have them stacked."""
    plain = set(body.inputs)
    views: set[Eqn] = set()
    for eqn in body.eqns:
        if eqn in first_eqns and is_view(eqn) and all(o in plain for o in eqn.operands):
            views.add(eqn)
            plain.update(eqn.results)
    needed = set(read)
    again: set[Eqn] = set()
    for eqn in reversed(body.eqns):
        if eqn in views and any(r in needed for r in eqn.results):
            again.add(eqn)
            needed.update(eqn.operands)
    return again
