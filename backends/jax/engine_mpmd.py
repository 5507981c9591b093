"""The `mpmd` engine: one XLA program for each (stage, task), dispatched from this process in schedule order.

Dispatch is asynchronous: each device works through its own queue, and transfers are `device_put`. Ranks are dealt to
the devices there are in turn, so that any number of ranks runs on any number of devices, one GPU included. On a mesh
with other axes than that of the stages, what runs a stage is a submesh of devices, and every rank needs its own.
"""

import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from plait.backends.jax.arrays import JaxArrays
from plait.backends.jax.compile import compile_pair, compile_stages
from plait.backends.jax.devices import beside
from plait.backends.jax.private import own_context
from plait.backends.jax.settled import Settled
from plait.backends.jax.sharded import step_tasks
from plait.backends.jax.submesh import Spreads, Submesh, submeshes
from plait.backends.jax.whole import Whole
from plait.backends.messages import largest_messages, stage_elsewhere
from plait.backends.order import is_forward, linear_order
from plait.backends.parts import pairs_here
from plait.backends.replicas import Counted
from plait.backends.runtime import Plan, Spans, StepInputs, StepOutputs
from plait.backends.spans import by_rank, dispatch
from plait.backends.step import Step, add_shared
from plait.backends.timing import TaskTimer, median_seconds, task_times
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.program import Program
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.times import Times
from plait.core_ir.types import TensorType


class MpmdEngine:
    """Runs the compute actions of all ranks from one process.

    home: where gradients of parameters lie that lie on no device of JAX; the first of `devices` by default.
    mesh, layouts: the axes beside that of the stages, and how parameters and buffers are cut over them.

    Raises UsageError where a mesh has more ranks than there are devices, UnsupportedError for buffers that change on a
    mesh with data axes.
    """

    def __init__(
        self,
        program: Program,
        schedule: ActionTable,
        *,
        devices: Sequence[jax.Device],
        home: jax.Device | None = None,
        mesh: Mesh | None = None,
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        started = time.perf_counter()
        self.stages = tuple(range(program.num_stages))
        self._home = devices[0] if home is None else home
        ranks = submeshes(mesh, devices)
        self._placed = placed = [ranks[rank % len(ranks)] for rank in schedule.placement]
        axis, _ = program.shard_axis or (None, 1)
        counted = Counted(program, mesh, layouts or {})
        spreads = Spreads(mesh, layouts or {}, axis, counted.names)
        self._whole = None if mesh is None else Whole(program, mesh, spreads, placed, counted)
        self.arrays = JaxArrays([Submesh(submesh.devices[:1]) for submesh in placed])
        settled = Settled(program, spreads)
        tasks = compile_stages(settled, placed)
        pairs = {
            pair: compile_pair(program, pair, placed[pair[0]], settled)
            for pair in pairs_here(program, self.stages)
        }
        arrays = self.arrays if mesh is None else JaxArrays(placed, spreads)
        step_tasks_ = step_tasks(program, placed, spreads)
        self._plan = Plan(program, self.stages, tasks, arrays, pairs, step_tasks_)
        self.reschedule(schedule)
        self.compile_seconds = time.perf_counter() - started

    def reschedule(self, schedule: ActionTable) -> None:
        """Go on under another order of the same tasks, each stage on the device where it is."""
        self._order = linear_order(schedule, self._plan.program)
        self._placement = schedule.placement

    def agree(self, error: Exception | None) -> None:
        """Raise `error`."""
        if error is not None:
            raise error

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step, dispatched; the arrays it gives may still be computed. Gradients lie beside their parameters."""
        with own_context():
            step = Step(self._plan, self._spread(inputs))
            for action in self._order:
                if inputs.backward or is_forward(action):
                    step.compute(action)
            step.end_reductions()
            loss = _sum_losses(step.losses(), inputs.loss_grad)
            grads = add_shared(step.gradients(), self._plan.arrays)
            aux, buffers = step.aux(), step.buffers()
            if self._whole is not None:
                loss, grads = self._whole.loss(loss), self._whole.gradients(grads)
                buffers = self._whole.buffers(buffers, inputs)
                aux = {name: self._whole.aux(x) for name, x in aux.items()}
            return StepOutputs(loss, beside(grads, inputs.params, self._home), buffers, aux)

    def profile(self, inputs: StepInputs) -> Times:
        """Times of some steps run task by task, each waited for, and of moves between devices."""
        timer = TaskTimer(jax.block_until_ready)
        with own_context():
            for step in timer.steps(self._plan, self._spread(inputs)):
                for action in self._order:
                    step.compute(action)
            transfer = {
                (source, target): self._move_seconds(types, source, target)
                for (source, target), types in largest_messages(self._plan.program).items()
            }
        return task_times(timer.rounds, len(self.stages), timer.pair_rounds, transfer=transfer)

    def measure(self, inputs: StepInputs) -> Spans:
        """As the actions were dispatched and their results came to be: see `timing.dispatch`."""
        for grad in self.run(inputs).grads.values():
            grad.block_until_ready()
        began = time.perf_counter()
        with own_context():
            step = Step(self._plan, self._spread(inputs))
            spans = dispatch(step, self._order, self._placement, jax.block_until_ready)
        return by_rank(spans, self._placement, began)

    def _spread(self, inputs: StepInputs) -> StepInputs:
        return inputs if self._whole is None else self._whole.inputs(inputs)

    def _move_seconds(self, types: Sequence[TensorType], source: int, target: int) -> float:
        """How long a message takes to another device."""
        moved_by = self._plan.arrays
        arrays = [moved_by.zeros(type, source) for type in types]
        target = stage_elsewhere(self._placement, source, target)

        def move() -> None:
            for moved in [moved_by.move(array, target) for array in arrays]:
                moved.block_until_ready()

        return median_seconds(move)


def _sum_losses(losses: Sequence[jax.Array], scale: float) -> jax.Array:
    """The sum in microbatch order, times the scale, in the loss's dtype."""
    total = jnp.zeros_like(losses[0])
    for loss in losses:
        total = total + loss
    return total * jnp.asarray(scale, total.dtype)
