"""What a program's tasks, transfers and memory cost on some hardware, without running it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from plait.core_ir.cost import seconds
from plait.core_ir.graph import Graph, Port
from plait.core_ir.hardware import Hardware
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.program import STEP_KINDS, Program, Stage, TaskKind
from plait.core_ir.schedule.edges import chain_edges
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.sharding import add_sharding
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Memory, Times
from plait.core_ir.types import TensorType

_KEPT_ROLES = ("residual", "activation", "handover")
_MOMENT_BYTES = 8
"""Adam's two moments of a parameter, in f32."""
_MASTER_BYTES = 4
"""The f32 copy of a parameter that is kept in fewer bytes, which Adam changes in its place."""


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds, in bytes.

    activation: of a microbatch from F to I: what F made or was sent and the backward reads.
    handover: of a microbatch from I to W: what I hands over, and of `activation` what W reads.
    parameters: all the time; parameters, gradients, buffers, the optimizer's state; of sharded ones the shard.
    unsharded: gathered parameters, while they are.
    gradients: those of whole parameters, until they are reduced.
    optimizer: what a step of the optimizer reads and writes.
    """

    activation: int
    handover: int
    parameters: int
    unsharded: int
    gradients: int
    optimizer: int


def estimate(
    program: Program,
    placement: Sequence[int],
    hardware: Hardware = CPU_CORE,
    mesh: Mesh | None = None,
) -> tuple[Times, Memory]:
    """Times in seconds and memory in bytes of a program whose stage s runs on rank `placement[s]`.

    mesh: where that is but a place along the axis of the stages; it says which links lie between nodes.

    Tasks: `cost.seconds` of F, I and W; B is I, then W, as engines run it; a pair F&B is that of the program's joint
    graph (the slowest, where a stage's F has several partners), else F, then B. Messages: latency, and bytes by
    bandwidth, of the link between the two ranks. Sending slows computing by `hardware.slowdown`. The optimizer is Adam
    in mixed precision: moments in f32, and an f32 copy of parameters in fewer bytes; its step takes the time to read
    and write these and the gradients. A parameter of several stages of one rank is held and changed once there.

    Memory leaves out what lives within one task alone (logits, say), messages under way and the batch.
    """
    trained = frozenset(name for stage in program.stages for name in _gradients(stage))
    held = [_bytes(program, stage, placement, trained) for stage in program.stages]
    between = () if mesh is None else mesh.axes_between_nodes(hardware.ranks_per_node)
    timed = partial(seconds, hardware=hardware, between=between)
    f, i, w = (_seconds(program, kind, timed) for kind in ("F", "I", "W"))
    ranks = placement if mesh is None else mesh.groups((mesh.stage_axis,))[0]
    if mesh is not None:
        ranks = [ranks[place] for place in placement]
    latency, transfer = _messages(program, ranks, hardware)
    times = Times(
        f=f,
        i=i,
        w=w,
        fb=_pairs(program, f, [a + b for a, b in zip(i, w, strict=True)], timed),
        comm=latency,
        transfer=transfer,
        optimizer=[each.optimizer / hardware.bytes_per_second for each in held],
        slowdown=hardware.slowdown,
        unshard=_seconds(program, "UNSHARD", timed),
        reduce_grad=_seconds(program, "REDUCE_GRAD", timed),
    )
    memory = Memory(
        activation=[each.activation for each in held],
        handover=[each.handover for each in held],
        parameters=[each.parameters for each in held],
        unsharded=[each.unsharded for each in held],
        gradients=[each.gradients for each in held],
    )
    return times, memory


def simulate_program(
    schedule: Schedule, program: Program, times: Times, memory: Memory | None = None
) -> Timeline:
    """A program under a schedule in time, with what sharded stages add to it."""
    sharded = program.sharded_stages
    table = schedule if sharded is None else add_sharding(schedule, sharded)
    return table.simulate(times, memory, edges=program.edge_kinds())


def _seconds(program: Program, kind: TaskKind, timed: Callable[[Graph], float]) -> list[float]:
    """The time of one kind of task, by stage; a stage without it takes none."""
    tasks = [stage.tasks.get(kind) for stage in program.stages]
    return [0.0 if task is None else timed(task) for task in tasks]


def _pairs(
    program: Program, f: Sequence[float], b: Sequence[float], timed: Callable[[Graph], float]
) -> list[float] | None:
    """The time of F&B by the stage of its F; None where the program has no pairs."""
    if not program.pairs:
        return None
    found: dict[int, float] = {}
    for (forward, _), graph in program.pairs.items():
        found[forward] = max(found.get(forward, 0.0), timed(graph))
    return [found.get(stage, f[stage] + b[stage]) for stage in range(program.num_stages)]


def _messages(
    program: Program, placement: Sequence[int], hardware: Hardware
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Latency and time on the link of each pair of stages, neighbours included through which nothing is sent."""
    num_bytes = {(e.source, e.target): 0 for e in chain_edges(program.num_stages)}
    for edge in program.edges:
        pair = edge.source, edge.target
        num_bytes[pair] = num_bytes.get(pair, 0) + edge.num_bytes
    latency, transfer = {}, {}
    for (source, target), sent in num_bytes.items():
        link = hardware.link(placement[source], placement[target])
        latency[source, target] = link.seconds(0)
        transfer[source, target] = sent / link.bytes_per_second
    return latency, transfer


def _bytes(
    program: Program, stage: Stage, placement: Sequence[int], trained: Collection[str]
) -> StageBytes:
    by_input, by_weights = (_kept(stage.tasks.get(kind)) for kind in ("I", "W"))
    from_forward = {p: t for p, t in {**by_input, **by_weights}.items() if p.role != "handover"}
    own = [p for p in stage.params if _is_first_on_its_rank(program, stage.index, p, placement)]
    types = program.param_types | program.shard_types
    parameters = sum(types[name].num_bytes for name in own)
    parameters += sum(types[name].num_bytes for name in _gradients(stage))
    parameters += sum(type_.num_bytes for type_ in _buffers(stage).values())
    state = sum(_state_bytes(types[name]) for name in own if name in trained)
    step = sum(_step_bytes(types[name]) for name in own if name in trained)
    unshard, reduce_grad = (stage.tasks.get(kind) for kind in STEP_KINDS)
    return StageBytes(
        activation=_total(from_forward),
        handover=_total(by_weights),
        parameters=parameters + state,
        unsharded=sum(t.num_bytes for t in unshard.output_types) if unshard else 0,
        gradients=sum(t.num_bytes for t in reduce_grad.input_types) if reduce_grad else 0,
        optimizer=step,
    )


def _kept(task: Graph | None) -> dict[Port, TensorType]:
    """What a task of the backward reads of earlier tasks of its stage."""
    if task is None:
        return {}
    ports = zip(task.input_ports, task.inputs, strict=True)
    return {port: value.type for port, value in ports if port.role in _KEPT_ROLES}


def _total(types: Mapping[Port, TensorType]) -> int:
    return sum(type_.num_bytes for type_ in types.values())


def _gradients(stage: Stage) -> dict[str, None]:
    """Names of the parameters that the stage gives a gradient of."""
    tasks = [task for kind, task in stage.tasks.items() if kind != "B"] or list(
        stage.tasks.values()
    )
    return {name: None for task in tasks for name, _ in task.outputs_of("param_grad")}


def _buffers(stage: Stage) -> dict[str, TensorType]:
    return {n: v.type for task in stage.tasks.values() for n, v in task.inputs_of("buffer")}


def _is_first_on_its_rank(
    program: Program, stage: int, name: str, placement: Sequence[int]
) -> bool:
    users = program.shared_params.get(name, (stage,))
    return stage == next(user for user in users if placement[user] == placement[stage])


def _state_bytes(type_: TensorType) -> int:
    return type_.size * (_MOMENT_BYTES + (_MASTER_BYTES if type_.dtype.itemsize < 4 else 0))


def _step_bytes(type_: TensorType) -> int:
    """The gradient read, moments and the f32 parameter read and written, and where that is a copy, the parameter."""
    itemsize = type_.dtype.itemsize
    changed = 2 * _MASTER_BYTES + itemsize if itemsize < 4 else 2 * itemsize
    return type_.size * (itemsize + 2 * _MOMENT_BYTES + changed)
