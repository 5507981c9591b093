"""The `spmd` engine: one XLA program for all ranks under `shard_map`, driven by a table of the schedule.

No Python runs between the tasks of a step. Ranks move in ticks: in one, each runs at most one action, then messages are
exchanged. On a mesh with other axes all ranks with the same stages run by the same row of the table.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from plait.backends.jax.arrays import JaxArrays
from plait.backends.jax.compile import COMPILER_OPTIONS
from plait.backends.jax.devices import beside, devices_for
from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.hlo import parse
from plait.backends.jax.private import own_context, shape_struct, spec
from plait.backends.jax.sharded import step_tasks
from plait.backends.jax.spmd.plan import Plan, make_plan
from plait.backends.jax.spmd.pools import INPUT_POOLS, PHASES, collect_pools
from plait.backends.jax.spmd.program import RESULT_POOLS, rank_program
from plait.backends.jax.spmd.staging import Packer, Unpacker, gather, pool_types, scatter
from plait.backends.jax.spmd.ticks import assign_ticks, pairs_of
from plait.backends.jax.spmd.wiring import wire
from plait.backends.jax.submesh import Spread, Spreads, Submesh, submeshes
from plait.backends.jax.whole import Whole
from plait.backends.replicas import Counted
from plait.backends.runtime import Spans, StepInputs, StepOutputs
from plait.backends.step import add_shared
from plait.core_ir import mesh as core_mesh
from plait.core_ir.errors import BatchError, UnsupportedError, UsageError
from plait.core_ir.mesh import Layout
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import KINDS, ActionKind
from plait.core_ir.schedule.times import Times

AXIS = "stage"


@dataclass(frozen=True)
class _Compiled:
    """One program with its staging."""

    plan: Plan
    executable: jax.stages.Compiled
    table: jax.Array
    input_types: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]]
    packers: tuple[Packer, ...]
    unpackers: tuple[Unpacker, ...]


class SpmdEngine:
    """Runs a program under a schedule as one program over one device for each rank.

    mesh, layouts: the axes beside that of the stages, and how parameters and buffers are cut over them.

    Raises UsageError where there are fewer devices than ranks, UnsupportedError for an op that JAX cannot run and for
    buffers that change on a mesh with data axes, ScheduleError for a schedule that cannot run.
    """

    def __init__(
        self,
        program: Program,
        schedule: ActionTable,
        *,
        devices: Sequence[jax.Device] | None = None,
        mesh: core_mesh.Mesh | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        self._program, self._parts = program, mesh
        axis, _ = program.shard_axis or (None, 1)
        counted = Counted(program, mesh, layouts or {})
        self._spreads = Spreads(mesh, layouts or {}, axis, counted.names)
        num_ranks = schedule.num_ranks if mesh is None else mesh.num_ranks
        self._devices = devices_for(num_ranks, devices)
        self._submeshes = submeshes(mesh, self._devices)
        self._mesh = whole_mesh(self._submeshes, mesh)
        placed = [self._submeshes[rank] for rank in schedule.placement]
        self._whole = None if mesh is None else Whole(program, mesh, self._spreads, placed, counted)
        self.stages = tuple(range(program.num_stages))
        self.arrays = JaxArrays([Submesh(submesh.devices[:1]) for submesh in placed])
        self._moves = self.arrays if mesh is None else JaxArrays(placed, self._spreads)
        self._step_tasks = step_tasks(program, placed, self._spreads)
        self.compile_seconds = 0.0
        self.reschedule(schedule)

    def reschedule(self, schedule: ActionTable) -> None:
        """Compile another order of the same tasks, each stage on the device where it is."""
        self._schedule = schedule
        self._compiled: dict[bool, _Compiled] = {}
        self._program_for(backward=any(kind.input_gradient for kind in _kinds(schedule)))

    def agree(self, error: Exception | None) -> None:
        """Raise `error`."""
        if error is not None:
            raise error

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step; the arrays it gives may still be computed. Gradients lie beside their parameters."""
        self._check_count(inputs)
        compiled = self._program_for(backward=inputs.backward)
        with own_context():
            given = inputs if self._whole is None else self._gathered(self._whole.inputs(inputs))
            packed = [packer(given) for packer in compiled.packers]
            pools = gather(compiled.input_types, packed, self._submeshes)
            results = compiled.executable(compiled.table, pools)
            named: dict[tuple[str, int, str], jax.Array] = {}
            parts = scatter(compiled.plan, results, self._submeshes, self._spreads)
            for part, unpacker in zip(parts, compiled.unpackers, strict=True):
                named.update(unpacker(part))
            partials = {
                (stage, name): x
                for (pool, stage, name), x in named.items()
                if pool.startswith("grads")
            }
            grads = add_shared(self._reduced(partials), self._moves)
            losses = [x for (pool, _, _), x in named.items() if pool == "loss"]
            loss = _sum_losses(losses[0], inputs.loss_grad) if losses else None
            aux = {name: x for (pool, _, name), x in named.items() if pool == "aux"}
            buffers = {name: x for (pool, _, name), x in named.items() if pool == "state"}
            if self._whole is not None:
                grads = self._whole.gradients(grads)
                loss = None if loss is None else self._whole.loss(loss)
                buffers = self._whole.buffers(buffers, inputs)
                aux = {name: self._whole.aux(x) for name, x in aux.items()}
            return StepOutputs(
                loss=loss,
                grads=beside(grads, inputs.params, self._devices[0]),
                buffers=buffers,
                aux=aux,
            )

    def profile(self, inputs: StepInputs) -> Times:
        """Times of the same tasks run one by one on the same devices: inside the one program none can be told."""
        alone = MpmdEngine(
            self._program,
            self._schedule,
            devices=self._devices,
            mesh=self._parts,
            layouts=self._spreads.layouts,
        )
        return alone.profile(inputs)

    def measure(self, inputs: StepInputs) -> Spans:
        """UsageError: nobody outside sees when the actions of one program run."""
        raise UsageError(
            "engine='spmd' runs a step as one program, whose actions cannot be timed one by one; measure with "
            "engine='mpmd', which runs the same tasks"
        )

    def compiled_text(self, *, backward: bool = True) -> str:
        """The optimised HLO of the program as it runs here."""
        return self._program_for(backward=backward).executable.as_text() or ""

    def plan(self, *, backward: bool = True) -> Plan:
        """The table and the pools that drive the program."""
        return self._program_for(backward=backward).plan

    def _program_for(self, *, backward: bool) -> _Compiled:
        if backward not in self._compiled:
            started = time.perf_counter()
            with own_context(self._mesh if self._spreads.has_auto else None):
                self._compiled[backward] = self._compile(PHASES if backward else ("F",))
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[backward]

    def _compile(self, kinds: Sequence[TaskKind]) -> _Compiled:
        plan, traced = trace_program(
            self._program, self._schedule, self._mesh, kinds, self._spreads
        )
        executable = traced.lower().compile(compiler_options=COMPILER_OPTIONS)
        if self._spreads.has_auto:
            check_exchanges(executable)
        placement, (stages, *_) = self._schedule.placement, self._mesh.axis_names
        table = jax.device_put(plan.table, NamedSharding(self._mesh, spec(stages)))
        staged = [
            (plan, placement, rank, submesh, self._spreads)
            for rank, submesh in enumerate(self._submeshes)
        ]
        packers = tuple(Packer(*of_rank) for of_rank in staged)
        unpackers = tuple(Unpacker(*of_rank) for of_rank in staged)
        types = _pool_types(plan, self._mesh, self._spreads, INPUT_POOLS)
        return _Compiled(plan, executable, table, types, packers, unpackers)

    def _gathered(self, inputs: StepInputs) -> StepInputs:
        """With whole parameters: one program cannot gather them between its tasks, so they are for the step."""
        found: dict[str, jax.Array] = {}
        for stage in self.stages:
            begin = self._step_tasks.get((stage, "UNSHARD"))
            if begin is not None:
                names = [
                    name for name, _ in self._program.task(stage, "UNSHARD").inputs_of("shard")
                ]
                shards = [self._moves.move(inputs.params[name], stage) for name in names]
                found |= dict(zip(names, begin(shards)(), strict=True))
        return replace(inputs, params={**inputs.params, **found})

    def _reduced(
        self, partials: dict[tuple[int, str], jax.Array]
    ) -> dict[tuple[int, str], jax.Array]:
        """With the gradients of sharded stages as their sums over the axis of the shards."""
        found = dict(partials)
        for stage in self.stages:
            begin = self._step_tasks.get((stage, "REDUCE_GRAD"))
            if begin is not None and partials:
                task = self._program.task(stage, "REDUCE_GRAD")
                keys = [(stage, name) for name, _ in task.inputs_of("param_grad")]
                found |= dict(zip(keys, begin([partials[key] for key in keys])(), strict=True))
        return found

    def _check_count(self, inputs: StepInputs) -> None:
        parts = 1 if self._parts is None else self._parts.num_parts
        given, wanted = len(inputs.microbatches), self._schedule.num_microbatches * parts
        if given != wanted:
            raise BatchError(
                f"got {given} microbatches, and the schedule {self._schedule.name!r} has "
                f"{self._schedule.num_microbatches}" + (f" in {parts} parts" if parts > 1 else "")
            )


def trace_program(
    program: Program,
    schedule: ActionTable,
    mesh: Mesh,
    kinds: Sequence[TaskKind] = PHASES,
    spreads: Spreads | None = None,
) -> tuple[Plan, jax.stages.Traced]:
    """The one program for the tasks of these kinds, traced: it can be lowered for platforms that are not here.

    The first axis of `mesh` is that of the stages; it has a device for each rank. Trace and lower it inside
    `jax.enable_x64(True)`; with auto axes, which `spreads` says, inside `jax.set_mesh(mesh)` too.
    """
    spreads = Spreads() if spreads is None else spreads
    placement, num_ranks = schedule.placement, schedule.num_ranks
    placements = spreads.mesh.placements if spreads.mesh and spreads.has_auto else None
    pools = collect_pools(program, placement, num_ranks, kinds, placements)
    tasks = wire(program, pools, placement, kinds)
    ticks = assign_ticks(schedule, program, backward="I" in kinds)
    plan = make_plan(
        pools,
        tasks,
        ticks,
        pairs_of(schedule),
        placement,
        schedule.num_microbatches,
        num_ranks,
    )
    stages, manual = mesh.axis_names[0], manual_axes(mesh, spreads)
    ranks = spec(manual)
    # Replication checking stays off: tasks hold no derivatives to which it could add a sum.
    mapped = jax.shard_map(
        rank_program(plan, stages),
        mesh=mesh,
        in_specs=(spec(stages), ranks),
        out_specs=ranks,
        axis_names=frozenset(manual),
        check_vma=False,
    )
    by_stage = NamedSharding(mesh, spec(stages))
    table = shape_struct(plan.table.shape, plan.table.dtype, by_stage)
    results = _pool_types(plan, mesh, spreads, RESULT_POOLS)
    shardings = jax.tree.map(lambda x: x.sharding, results)
    traced: jax.stages.Traced = jax.jit(mapped, out_shardings=shardings).trace(
        table, _pool_types(plan, mesh, spreads, INPUT_POOLS)
    )
    return plan, traced


def check_exchanges(executable: jax.stages.Compiled) -> None:
    """UnsupportedError where XLA moves values within a task in a way that all devices meet for, whatever they run."""
    for depth, instruction in parse(executable.as_text() or "").walk():
        if depth > 1 and instruction.opcode.startswith("collective-permute"):
            raise UnsupportedError(
                "engine='spmd': as the model is annotated XLA permutes values among devices within a task, which ranks "
                "with other tasks would have to take part in; annotate so that no value changes the dim along which it "
                "is cut, or use engine='mpmd'"
            )


def stage_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Devices along the axis of stages."""
    return whole_mesh(submeshes(None, devices), None)


def whole_mesh(ranks: Sequence[Submesh], mesh: core_mesh.Mesh | None) -> Mesh:
    """All devices: along the axis of stages the submeshes, then the other axes."""
    stages = AXIS if mesh is None else mesh.stage_axis
    others = {} if mesh is None else {axis: mesh.axes[axis] for axis in mesh.other_axes}
    grid = np.empty(len(ranks) * len(ranks[0].devices), object)
    grid[:] = [device for submesh in ranks for device in submesh.devices]
    return Mesh(grid.reshape(len(ranks), *others.values()), (stages, *others))


def manual_axes(mesh: Mesh, spreads: Spreads) -> tuple[str, ...]:
    """The axes of a mesh of devices that are not left to the compiler."""
    auto = () if spreads.mesh is None else spreads.mesh.auto_axes
    return tuple(axis for axis in mesh.axis_names if axis not in auto)


def _pool_types(
    plan: Plan, mesh: Mesh, spreads: Spreads, pools: Sequence[str]
) -> dict[str, tuple[jax.ShapeDtypeStruct, ...]]:
    return pool_types(plan, mesh, Spread((manual_axes(mesh, spreads),)), pools)


def _kinds(schedule: ActionTable) -> set[ActionKind]:
    return {KINDS[code] for code in schedule.kind}


@jax.jit
def _sum_losses(losses: jax.Array, scale: jax.Array) -> jax.Array:
    """The sum over the last dim, in microbatch order from zero, times the scale."""
    losses = losses.T
    total, _ = lax.scan(lambda total, loss: (total + loss, None), jnp.zeros_like(losses[0]), losses)
    return total * scale.astype(total.dtype)
