"""Cut a joint program at its markers into stages, each with a forward and a backward task.

    %h = dot_general(%x, %w0)                      stage 0 F: %h = dot_general(%x, %w0)
    %k = boundary(%h) {index=0}                                -> activation %h
    %y = dot_general(%k, %w1)                      stage 1 F: activation %k
    ...                                                        %y = dot_general(%k, %w1)
    %gk = dot_general(%gy, %w1)               ->   stage 1 B: %gk = dot_general(%gy, %w1)
    %gh = boundary(%gk) {index=0, backward=true}               -> gradient %gk
    %gw0 = dot_general(%x, %gh)                    stage 0 B: gradient %gh
                                                               %gw0 = dot_general(%x, %gh)

Edges join any two stages: a value that does not pass through markers goes directly to each stage that uses it. A
parameter used by several stages gives a part of its gradient in each. The rules are in `free_values`, `assign_forward`
and `assign_backward`. No `boundary` is left.
"""

from collections.abc import Iterator

from plait.core_ir.errors import PartitionError
from plait.core_ir.graph import Graph, Port, Role, Value
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.assemble_tasks import StageParts, assemble_tasks
from plait.core_ir.passes.assign_backward import assign_backward
from plait.core_ir.passes.assign_forward import assign_forward
from plait.core_ir.passes.backward_needs import BackwardNeeds, find_backward_needs
from plait.core_ir.passes.backward_stages import BackwardStages
from plait.core_ir.passes.crossings import Crossing, find_crossings
from plait.core_ir.passes.forward_stages import ForwardStages, first, members
from plait.core_ir.passes.free_values import find_free_values
from plait.core_ir.passes.joint import Joint, take_apart
from plait.core_ir.program import Edge, EdgeKind, Program, Stage

_DIRECTIONS: dict[EdgeKind, str] = {"activation": "forward", "gradient": "back"}


def partition_stages(graph: Graph, num_stages: int, *, name: str = "") -> Program:
    """A program of `num_stages` stages, each with tasks F and B, cut at the markers of a joint graph.

    Raises PartitionError, naming value, stages and source, where a value would have to flow to an earlier stage, and
    where the markers do not fit the number of stages.
    """
    if num_stages < 1:
        raise PartitionError(f"a program has at least one stage, got {num_stages}")
    joint, free = find_free_values(take_apart(graph, num_stages))
    forward = assign_forward(joint, free)
    backward = assign_backward(joint, forward)
    needs = find_backward_needs(joint, forward, backward)
    crossings = find_crossings(joint, forward, backward, needs)
    parts = _parts(joint, forward, backward, needs)
    edges = tuple(_edge(crossing, parts) for crossing in crossings)
    name = name or graph.name
    stages = []
    for part in parts:
        forward_task, backward_task = assemble_tasks(part, name)
        stages.append(Stage(part.index, {"F": forward_task, "B": backward_task}))
    return Program(name, tuple(stages), edges, tuple(_notes(stages, crossings)))


def _parts(
    joint: Joint, forward: ForwardStages, backward: BackwardStages, needs: BackwardNeeds
) -> list[StageParts]:
    state = {v for v in joint.inputs if v in forward.defined}
    runtime = {v: p for v, p in joint.inputs.items() if v not in state}
    parts = []
    for stage in range(joint.num_stages):
        owned = {v: joint.inputs[v] for v in state if forward.defined[v] >> stage & 1}
        parts.append(StageParts(stage, {**runtime, **owned}, backward=[*needs.redone[stage]]))
    for eqn in joint.forward:
        for stage in members(forward.placed.get(eqn, 0)):
            parts[stage].forward.append(eqn)
    for eqn in backward.eqns:
        if eqn.op is not boundary:
            for stage in members(backward.placed[eqn]):
                parts[stage].backward.append(eqn)
    for port, value in joint.outputs_of("loss", "aux", "buffer_update"):
        anywhere = value in joint.inputs and value not in forward.defined
        stage = first(forward.used.get(value, 0) or 1) if anywhere else forward.home(value)
        parts[stage].results.append((port, value))
    for port, value, stage in backward.outputs:
        parts[stage].param_grads.append((port, value))
    return parts


def _edge(crossing: Crossing, parts: list[StageParts]) -> Edge:
    """The edge of a crossing, whose ports are recorded in the parts of both stages."""
    source, target = parts[crossing.source], parts[crossing.target]
    if crossing.kind == "activation":
        output = _port("activation", source.sent, source.received, crossing.sent)
        read = _port("activation", target.received, target.sent, crossing.received)
    else:
        output = _port("gradient", source.sent_gradients, source.received_gradients, crossing.sent)
        read = _port(
            "gradient", target.received_gradients, target.sent_gradients, crossing.received
        )
    num_bytes = crossing.sent.type.num_bytes
    return Edge(crossing.source, output, crossing.target, read, crossing.kind, num_bytes)


def _port(role: Role, own: dict[Value, Port], other: dict[Value, Port], value: Value) -> Port:
    """The port of a value that crosses; one that comes in and goes out again keeps its port."""
    if value not in own:
        own[value] = other.get(value) or Port(role, str(len(own.keys() | other.keys())))
    return own[value]


def _notes(stages: list[Stage], crossings: list[Crossing]) -> Iterator[str]:
    """The width of every cut, and what a user may not have meant."""
    for cut in range(len(stages) - 1):
        widths = []
        for kind, direction in _DIRECTIONS.items():
            over = [c for c in crossings if c.kind == kind and _spans(c, cut)]
            num_bytes = sum(c.sent.type.num_bytes for c in over)
            widths.append(
                f"{len(over)} values, {num_bytes} bytes {direction}"
                if over
                else f"nothing {direction}"
            )
        yield f"cut {cut}: {'; '.join(widths)}"
    for crossing in crossings:
        if not crossing.marked:
            yield (
                f"{crossing.kind} {crossing.sent.type} goes from stage {crossing.source} to stage {crossing.target}"
                " without passing a boundary"
            )
    for stage in stages:
        if not any(graph.eqns for graph in stage.tasks.values()):
            yield f"stage {stage.index} computes nothing"


def _spans(crossing: Crossing, cut: int) -> bool:
    low, high = sorted((crossing.source, crossing.target))
    return low <= cut < high
