"""Which values outlive a task, and in which pool each of them stands.

A pool is an array with rows; a row holds one bundle of values. Pools, and what each has a row for:

    params frozen buffers    stage       read alone: trainable parameters, the others, buffers that no task changes
    microbatch               microbatch  batch leaves, key and loss cotangent that a rank's stages read
    state                    stage       buffers that F changes
    grads.I grads.W          stage       sums of what I and W give for each parameter
    loss aux                 F           one value for each microbatch
    saved.I saved.W          F           what I, or at last W, still reads of it
    handover                 I           what W reads of it
    activation+1 gradient+3  F or I      a message: what it makes for the rank so many ranks further on (0: its own)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plait.backends.jax.spmd.layout import Layout, Place
from plait.core_ir import mesh
from plait.core_ir.errors import UnsupportedError, VerifyError
from plait.core_ir.graph import Port, Role
from plait.core_ir.program import Program, Stage, TaskKind
from plait.core_ir.types import TensorType

Ports = dict[Port, TensorType]

PHASES: tuple[TaskKind, ...] = ("F", "I", "W")
"""Kinds of task in the order in which they run inside a tick."""

INPUT_POOLS = ("params", "frozen", "buffers", "microbatch", "state")
"""Pools that hold what a step is given."""

MICROBATCH_ROLES: tuple[Role, ...] = ("batch", "rng_key", "loss_grad")


@dataclass(frozen=True)
class Arrival:
    """Where an input that an edge fills stands: in a row of `source`'s, under the port the source gave it."""

    pool: str
    source: int
    port: Port


@dataclass(frozen=True)
class Pools:
    """The pools of a program on ranks, for the kinds of task that run.

    bundles: for each pool, what a row of each owner holds; the owner is a rank for `microbatch`, else a stage.
    offsets: for each pool of messages, how many ranks further on its rows are read.
    arrivals: by target stage and input port.
    placements: of parameters over auto axes; None where there are none.
    """

    bundles: Mapping[str, Mapping[int, Ports]]
    offsets: Mapping[str, int]
    arrivals: Mapping[tuple[int, Port], Arrival]
    placements: Mapping[str, mesh.Layout] | None = None

    def placement(self, port: Port) -> mesh.Layout:
        """How what stands at a port lies over auto axes, so far as that is known."""
        is_placed = port.role in ("param", "param_grad")
        return self.placements.get(port.name, ()) if is_placed and self.placements else ()

    def cuts(self, pool: str) -> tuple[mesh.Layout, ...]:
        """How the arrays of a pool's fields, `[devices, rows, *field]`, lie over auto axes: as what stands in them."""
        found: list[set[mesh.Layout]] = [set() for _ in self.layouts[pool].fields]
        for owner, ports in self.bundles[pool].items():
            for port in ports:
                place = self.place(pool, owner, port)
                if place.field is not None:
                    found[place.field].add(self.placement(port))
        return tuple(((), (), *one.pop()) if len(one) == 1 else () for one in found)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The fields of each pool."""
        packs = self.placements is None
        return {
            pool: Layout.of((list(p.values()) for p in owners.values()), packs=packs)
            for pool, owners in self.bundles.items()
        }

    @cached_property
    def _places(self) -> dict[tuple[str, int], dict[Port, Place]]:
        return {
            (pool, owner): dict(
                zip(ports, self.layouts[pool].place(list(ports.values())), strict=True)
            )
            for pool, owners in self.bundles.items()
            for owner, ports in owners.items()
        }

    def held(self, pool: str, owner: int) -> Ports:
        """The ports in a row of that owner; none where it has no row."""
        return self.bundles.get(pool, {}).get(owner, {})

    def place(self, pool: str, owner: int, port: Port) -> Place:
        """Where in the row a port's value stands."""
        return self._places[pool, owner][port]


@dataclass
class _Collector:
    bundles: dict[str, dict[int, Ports]] = field(default_factory=dict)

    def add(self, pool: str, owner: int, ports: Ports) -> None:
        if ports:
            self.bundles.setdefault(pool, {}).setdefault(owner, {}).update(ports)


def collect_pools(
    program: Program,
    placement: Sequence[int],
    num_ranks: int,
    kinds: Sequence[TaskKind] = PHASES,
    placements: Mapping[str, mesh.Layout] | None = None,
) -> Pools:
    """The pools of these kinds of task. Pools of inputs are those of all kinds, so that one staging serves any kinds.

    Raises UnsupportedError for a buffer that one stage changes and another uses.
    """
    collector = _Collector()
    changed = _changed_buffers(program)
    trainable = {
        port.name
        for stage in program.stages
        for kind in ("I", "W")
        for port in outputs(stage, kind, "param_grad")
    }
    for stage in program.stages:
        _check_buffers(stage, changed)
        _collect_inputs(collector, stage, placement[stage.index], trainable, changed)
        collector.add("loss", stage.index, outputs(stage, "F", "loss"))
        collector.add("aux", stage.index, outputs(stage, "F", "aux"))
        _collect_gradients(collector, stage, kinds)
    offsets: dict[str, int] = {}
    arrivals: dict[tuple[int, Port], Arrival] = {}
    for edge in program.edges:
        type_ = inputs(program.stages[edge.target], kinds).get(edge.input)
        if type_ is None:  # read by no task that runs
            continue
        offset = (placement[edge.target] - placement[edge.source]) % num_ranks
        pool = f"{edge.kind}+{offset}"
        offsets[pool] = offset
        collector.add(pool, edge.source, {edge.output: type_})
        arrivals[edge.target, edge.input] = Arrival(pool, edge.source, edge.output)
    for stage in program.stages:
        arrived = {port for target, port in arrivals if target == stage.index}
        in_pair = any(backward == stage.index for _, backward in program.pairs)
        _collect_saved(collector, stage, kinds, arrived, ("B",) if in_pair else ())
    return Pools(collector.bundles, offsets, arrivals, placements)


def inputs(stage: Stage, kinds: Iterable[TaskKind]) -> Ports:
    """The input ports of these tasks of a stage, in order of first use."""
    ports: Ports = {}
    for kind in kinds:
        graph = stage.tasks[kind]
        ports.update((p, v.type) for p, v in zip(graph.input_ports, graph.inputs, strict=True))
    return ports


def outputs(stage: Stage, kind: TaskKind, *roles: Role) -> Ports:
    """The output ports of a task, of any role or of these."""
    graph = stage.tasks[kind]
    pairs = zip(graph.output_ports, graph.outputs, strict=True)
    return {p: v.type for p, v in pairs if not roles or p.role in roles}


def _changed_buffers(program: Program) -> dict[str, int]:
    """The stage that changes each buffer which one does."""
    return {
        port.name: stage.index
        for stage in reversed(program.stages)
        for port in outputs(stage, "F", "buffer_update")
    }


def _check_buffers(stage: Stage, changed: Mapping[str, int]) -> None:
    for name in stage.buffers:
        owner = changed.get(name, stage.index)
        if owner != stage.index:
            raise UnsupportedError(
                f"buffer {name!r} is changed in stage {owner} and used in stage {stage.index} too: what that stage "
                "reads would depend on the schedule; cut the model so that one stage holds all uses of it"
            )


def _collect_inputs(
    collector: _Collector,
    stage: Stage,
    rank: int,
    trainable: set[str],
    changed: Mapping[str, int],
) -> None:
    for port, type_ in inputs(stage, PHASES).items():
        if port.role == "param":
            pool = "params" if port.name in trainable else "frozen"
            collector.add(pool, stage.index, {port: type_})
        elif port.role == "buffer":
            pool = "state" if port.name in changed else "buffers"
            collector.add(pool, stage.index, {port: type_})
        elif port.role in MICROBATCH_ROLES:
            collector.add("microbatch", rank, {port: type_})
    for port, type_ in outputs(stage, "F", "buffer_update").items():
        collector.add("state", stage.index, {Port("buffer", port.name): type_})


def _collect_gradients(collector: _Collector, stage: Stage, kinds: Iterable[TaskKind]) -> None:
    of_i, of_w = outputs(stage, "I", "param_grad"), outputs(stage, "W", "param_grad")
    twice = sorted(port.name for port in of_i.keys() & of_w.keys())
    if twice:
        raise VerifyError(f"stage {stage.index}: both I and W give the gradient of {twice}")
    for kind in kinds:
        collector.add(f"grads.{kind}", stage.index, outputs(stage, kind, "param_grad"))


def _collect_saved(
    collector: _Collector,
    stage: Stage,
    kinds: Sequence[TaskKind],
    arrived: set[Port],
    backward: Sequence[TaskKind],
) -> None:
    """What I and W (and the whole `backward`, of a pair) read of F and W of I, apart from what arrived by an edge."""
    if "I" not in kinds:
        return
    of_f = outputs(stage, "F")
    # A task of the backward sees a changed buffer as F saw it.
    of_f.update(collector.bundles.get("state", {}).get(stage.index, {}))
    of_i = outputs(stage, "I")
    for_w, for_i = inputs(stage, ("W",)), inputs(stage, ("I", *backward))
    for port, type_ in {**for_w, **for_i}.items():
        if port in arrived:
            continue
        if port in for_w and port in of_i:
            collector.add("handover", stage.index, {port: type_})
        elif port in of_f:
            pool = "saved.W" if port in for_w else "saved.I"
            collector.add(pool, stage.index, {port: type_})
