"""Put equations, inputs and outputs into one order that follows from structure, so that equal programs print equally.

    graph @f(%b: f32[3] {param "b"}, %x: f32[3] {batch "x"}) -> (...) {
      %u: f32[3] = exp(%b)                      %t: f32[3] = neg(%x)
      %t: f32[3] = neg(%x)                 ->   %u: f32[3] = exp(%b)
      %y: f32[3] = sub(%t, %u)                  %y: f32[3] = sub(%t, %u)
    }

Equations stand in depth-first order from the outputs, operands from the left: each as late as its first reader allows.
Outputs stand by role; parameter gradients from the last parameter that the rest reads to the first, which is the order
in which a backward makes them. Inputs stand by role, then by first use. Equations with an effect keep their order.
Equations that nothing needs are dropped.
"""

from collections.abc import Iterator
from dataclasses import replace

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.passes.assemble_tasks import ROLE_ORDER
from plait.core_ir.passes.equations import has_effect

_RANK = {role: rank for rank, role in enumerate(ROLE_ORDER)}


def sort_equations(graph: Graph) -> Graph:
    """The graph in canonical order. Ports without a role stay where they are: their position is what they mean."""
    order = _Order(graph)
    outputs = list(zip(graph.output_ports, graph.outputs, strict=True))
    inputs = list(zip(graph.input_ports, graph.inputs, strict=True))
    if not all(port.role for port, _ in (*inputs, *outputs)):
        for _, value in outputs:
            order.need(value)
        return replace(graph, eqns=order.finished())

    outputs.sort(key=lambda item: _RANK[item[0].role])
    grads = [item for item in outputs if item[0].role == "param_grad"]
    outputs = outputs[: len(outputs) - len(grads)]
    for _, value in outputs:
        order.need(value)
    params = {port.name: value for port, value in inputs if port.role == "param"}
    use = order.first_use
    place = {name: -use[value] for name, value in params.items() if value in use}
    grads.sort(key=lambda grad: place.get(grad[0].name, 1))
    for _, value in grads:
        order.need(value)
    outputs += grads
    eqns = order.finished()
    inputs.sort(key=lambda item: (_RANK[item[0].role], use.get(item[1], len(use))))
    return Graph(
        graph.name,
        tuple(v for _, v in inputs),
        eqns,
        tuple(v for _, v in outputs),
        tuple(p for p, _ in inputs),
        tuple(p for p, _ in outputs),
    )


class _Order:
    """Depth-first order of equations, from the values that are asked for."""

    def __init__(self, graph: Graph) -> None:
        self._producers = graph.producers()
        self._effects = [eqn for eqn in graph.eqns if has_effect(eqn)]
        self._before = dict(zip(self._effects[1:], self._effects, strict=False))
        self._seen: set[Eqn] = set()
        self._eqns: list[Eqn] = []
        self.first_use: dict[Value, int] = {}

    def need(self, value: Value) -> None:
        """Put what makes a value next, its operands before it."""
        eqn = self._producers.get(value)
        if eqn is None:
            self.first_use.setdefault(value, len(self.first_use))
        elif eqn not in self._seen:
            self._put(eqn)

    def finished(self) -> tuple[Eqn, ...]:
        """The equations asked for, and all with an effect."""
        for eqn in self._effects:
            if eqn not in self._seen:
                self._put(eqn)
        return tuple(self._eqns)

    def _put(self, eqn: Eqn) -> None:
        self._seen.add(eqn)
        stack = [(eqn, self._unseen(eqn))]
        while stack:
            eqn, rest = stack[-1]
            inner = next(rest, None)
            if inner is None:
                self._eqns.append(eqn)
                stack.pop()
            else:
                self._seen.add(inner)
                stack.append((inner, self._unseen(inner)))

    def _unseen(self, eqn: Eqn) -> Iterator[Eqn]:
        """The equations to put before this one, each found when it is its turn."""
        before = self._before.get(eqn)
        if before is not None and before not in self._seen:
            yield before
        for operand in eqn.operands:
            inner = self._producers.get(operand)
            if inner is None:
                self.first_use.setdefault(operand, len(self.first_use))
            elif inner not in self._seen:
                yield inner
