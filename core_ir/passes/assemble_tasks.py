"""The task graphs of one stage: fresh ports, and the residuals that its backward asks of its forward."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.core_ir.graph import Eqn, Graph, Port, Role, Value

ROLE_ORDER: tuple[Role, ...] = (
    *("param", "buffer", "batch", "rng_key", "loss_grad"),
    *("activation", "gradient", "residual", "handover"),
    *("loss", "aux", "buffer_update", "param_grad"),
)
_RANK = {role: rank for rank, role in enumerate(ROLE_ORDER)}


@dataclass
class StageParts:
    """What one stage computes, receives and sends, by values of the joint program.

    inputs: ports that the runtime fills. results: what F gives besides activations and residuals.
    """

    index: int
    inputs: Mapping[Value, Port]
    forward: list[Eqn] = field(default_factory=list)
    backward: list[Eqn] = field(default_factory=list)
    received: dict[Value, Port] = field(default_factory=dict)
    sent: dict[Value, Port] = field(default_factory=dict)
    received_gradients: dict[Value, Port] = field(default_factory=dict)
    sent_gradients: dict[Value, Port] = field(default_factory=dict)
    results: list[tuple[Port, Value]] = field(default_factory=list)
    param_grads: list[tuple[Port, Value]] = field(default_factory=list)


def assemble_tasks(parts: StageParts, name: str) -> tuple[Graph, Graph]:
    """F and B of one stage, named `name.stageN.forward` and `name.stageN.backward`."""
    prefix = f"{name}.stage{parts.index}"
    known = {**parts.inputs, **parts.received, **parts.sent, **parts.received_gradients}
    known.update((v, p) for p, v in reversed(parts.results) if v not in known)
    outputs = [
        *((p, v) for v, p in parts.sent_gradients.items()),
        *parts.param_grads,
    ]
    made = {r for eqn in parts.backward for r in eqn.results}
    read = [o for eqn in parts.backward for o in eqn.operands] + [v for _, v in outputs]
    residuals: dict[Value, Port] = {}
    for value in dict.fromkeys(v for v in read if v not in made and v not in known):
        residuals[value] = Port("residual", str(len(residuals)))
    backward = build_graph(f"{prefix}.backward", {**known, **residuals}, parts.backward, outputs)
    forward = build_graph(
        f"{prefix}.forward",
        {**parts.inputs, **parts.received},
        parts.forward,
        [
            *((p, v) for v, p in parts.sent.items()),
            *((p, v) for v, p in residuals.items()),
            *parts.results,
        ],
        always=parts.received,
    )
    return forward, backward


def build_graph(
    name: str,
    ports: Mapping[Value, Port],
    eqns: Sequence[Eqn],
    outputs: Iterable[tuple[Port, Value]],
    *,
    always: Iterable[Value] = (),
) -> Graph:
    """A graph of these equations; what they and the outputs read and do not define becomes fresh inputs.

    `ports` says what each input is for; inputs and outputs stand in the order of roles, then of first use. `always`
    are inputs whether read or not.
    """
    outputs = sorted(outputs, key=lambda item: _RANK[item[0].role])
    fresh: dict[Value, Value] = {}
    defined: set[Value] = set()
    kept: list[Eqn] = []

    def inside(value: Value) -> Value:
        if value in defined:
            return value
        if value not in fresh:
            fresh[value] = Value(value.type, value.name)
        return fresh[value]

    for eqn in eqns:
        kept.append(eqn.with_operands([inside(o) for o in eqn.operands]))
        defined.update(eqn.results)
    results = tuple(inside(value) for _, value in outputs)
    for value in always:
        inside(value)
    inputs = sorted(fresh, key=lambda value: _RANK[ports[value].role])
    return Graph(
        name,
        tuple(fresh[v] for v in inputs),
        tuple(kept),
        results,
        tuple(ports[v] for v in inputs),
        tuple(port for port, _ in outputs),
    )
