"""The `spmd` engine: one XLA program for all ranks under `shard_map`, driven by a table of the schedule.

No Python runs between the tasks of a step. Ranks move in ticks: in one, each runs at most one action, then messages are
exchanged.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from plait.backends.jax.arrays import JaxArrays
from plait.backends.jax.compile import COMPILER_OPTIONS
from plait.backends.jax.devices import beside, devices_for
from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.private import shape_struct, spec
from plait.backends.jax.spmd.plan import Plan, make_plan
from plait.backends.jax.spmd.pools import PHASES, collect_pools
from plait.backends.jax.spmd.program import rank_program
from plait.backends.jax.spmd.staging import Packer, Unpacker, gather, input_types, part_of
from plait.backends.jax.spmd.ticks import assign_ticks, pairs_of
from plait.backends.jax.spmd.wiring import wire
from plait.backends.jax.submesh import Submesh
from plait.backends.runtime import Spans, StepInputs, StepOutputs
from plait.backends.step import add_shared
from plait.core_ir.errors import BatchError, UsageError
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
    packers: tuple[Packer, ...]
    unpackers: tuple[Unpacker, ...]


class SpmdEngine:
    """Runs a program under a schedule as one program over one device for each rank.

    Raises UsageError where there are fewer devices than ranks, UnsupportedError for an op that JAX cannot run,
    ScheduleError for a schedule that cannot run.
    """

    def __init__(
        self,
        program: Program,
        schedule: ActionTable,
        *,
        devices: Sequence[jax.Device] | None = None,
    ) -> None:
        self._program = program
        self._devices = devices_for(schedule.num_ranks, devices)
        self._mesh = stage_mesh(self._devices)
        self.stages = tuple(range(program.num_stages))
        self.arrays = JaxArrays([Submesh((self._devices[rank],)) for rank in schedule.placement])
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
        given = len(inputs.microbatches)
        if given != self._schedule.num_microbatches:
            raise BatchError(
                f"got {given} microbatches, and the schedule {self._schedule.name!r} has "
                f"{self._schedule.num_microbatches}"
            )
        compiled = self._program_for(backward=inputs.backward)
        with jax.enable_x64(True):
            parts = [packer(inputs) for packer in compiled.packers]
            results = compiled.executable(compiled.table, gather(self._mesh, AXIS, parts))
            named: dict[tuple[str, int, str], jax.Array] = {}
            for device, unpacker in zip(self._devices, compiled.unpackers, strict=True):
                named.update(unpacker(part_of(results, device)))
            grads = {
                (stage, name): x
                for (pool, stage, name), x in named.items()
                if pool.startswith("grads")
            }
            losses = [x for (pool, _, _), x in named.items() if pool == "loss"]
            return StepOutputs(
                loss=_sum_losses(losses[0], inputs.loss_grad) if losses else None,
                grads=beside(
                    add_shared(self._program, grads, self.arrays), inputs.params, self._devices[0]
                ),
                buffers={name: x for (pool, _, name), x in named.items() if pool == "state"},
                aux={name: x for (pool, _, name), x in named.items() if pool == "aux"},
            )

    def profile(self, inputs: StepInputs) -> Times:
        """Times of the same tasks run one by one on the same devices: inside the one program none can be told."""
        return MpmdEngine(self._program, self._schedule, devices=self._devices).profile(inputs)

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
            with jax.enable_x64(True):
                self._compiled[backward] = self._compile(PHASES if backward else ("F",))
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[backward]

    def _compile(self, kinds: Sequence[TaskKind]) -> _Compiled:
        plan, traced = trace_program(self._program, self._schedule, self._mesh, kinds)
        executable = traced.lower().compile(compiler_options=COMPILER_OPTIONS)
        table = jax.device_put(plan.table, NamedSharding(self._mesh, spec(AXIS)))
        ranked = list(enumerate(self._devices))
        placement = self._schedule.placement
        packers = tuple(Packer(plan, placement, rank, device) for rank, device in ranked)
        unpackers = tuple(Unpacker(plan, placement, rank, device) for rank, device in ranked)
        return _Compiled(plan, executable, table, packers, unpackers)


def trace_program(
    program: Program, schedule: ActionTable, mesh: Mesh, kinds: Sequence[TaskKind] = PHASES
) -> tuple[Plan, jax.stages.Traced]:
    """The one program for the tasks of these kinds, traced: it can be lowered for platforms that are not here.

    `mesh` has one axis, AXIS, with a device for each rank. Trace and lower it inside `jax.enable_x64(True)`.
    """
    placement, num_ranks = schedule.placement, schedule.num_ranks
    pools = collect_pools(program, placement, num_ranks, kinds)
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
    # Replication checking stays off: tasks hold no derivatives to which it could add a sum.
    mapped = jax.shard_map(
        rank_program(plan, AXIS),
        mesh=mesh,
        in_specs=spec(AXIS),
        out_specs=spec(AXIS),
        check_vma=False,
    )
    over_ranks = NamedSharding(mesh, spec(AXIS))
    table = shape_struct(plan.table.shape, plan.table.dtype, over_ranks)
    traced: jax.stages.Traced = jax.jit(mapped).trace(table, input_types(plan, over_ranks))
    return plan, traced


def stage_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Devices along the axis of stages."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def _kinds(schedule: ActionTable) -> set[ActionKind]:
    return {KINDS[code] for code in schedule.kind}


@jax.jit
def _sum_losses(losses: jax.Array, scale: jax.Array) -> jax.Array:
    """The sum in microbatch order from zero, times the scale."""
    total, _ = lax.scan(lambda total, loss: (total + loss, None), jnp.zeros_like(losses[0]), losses)
    return total * scale.astype(total.dtype)
