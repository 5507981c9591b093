"""The `mpmd` engine: one XLA program for each (stage, task), dispatched from this process in schedule order.

Dispatch is asynchronous: each device works through its own queue, and transfers are `device_put`. Ranks are dealt to
the devices there are in turn, so that any number of ranks runs on any number of devices, one GPU included.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from plait.backends.jax.compile import compile_task
from plait.backends.jax.devices import beside
from plait.backends.messages import largest_messages, stage_elsewhere
from plait.backends.order import linear_order
from plait.backends.parts import pairs_here, parted_pair
from plait.backends.runtime import Plan, Spans, StepInputs, StepOutputs, task_graphs
from plait.backends.spans import by_rank, dispatch
from plait.backends.step import Step, add_shared
from plait.backends.timing import TaskTimer, median_seconds, task_times
from plait.core_ir.arrays import is_torch, to_numpy
from plait.core_ir.program import Program
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.times import Times
from plait.core_ir.types import TensorType


class JaxArrays:
    """Arrays on the device of each stage, as the runtime handles them."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = tuple(devices)
        self._add = jax.jit(jnp.add, donate_argnums=0)

    def zeros(self, type: TensorType, stage: int) -> jax.Array:
        """Zeros of a type."""
        return self._put(np.zeros(type.shape, type.dtype.numpy), stage)

    def scalar(self, number: float, type: TensorType, stage: int) -> jax.Array:
        """A number in that type."""
        return self._put(np.full(type.shape, number, type.dtype.numpy), stage)

    def key(self, words: NDArray[np.uint32], stage: int) -> jax.Array:
        """A u32[2] key."""
        return self._put(words, stage)

    def add(self, total: jax.Array, part: jax.Array) -> jax.Array:
        """total + part; `total` is donated."""
        with jax.enable_x64(True):
            added: jax.Array = self._add(total, part)
        return added

    def move(self, array: Any, stage: int) -> jax.Array:
        """The array on the stage's device; itself when it is there."""
        return self._put(to_numpy(array) if is_torch(array) else array, stage)

    def stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Along a new dim 0."""
        return jnp.stack(list(parts))

    def _put(self, array: Any, stage: int) -> jax.Array:
        placed: jax.Array = jax.device_put(array, self._devices[stage])
        return placed


class MpmdEngine:
    """Runs the compute actions of all ranks from one process.

    home: where gradients of parameters lie that lie on no device of JAX; the first of `devices` by default.
    """

    def __init__(
        self,
        program: Program,
        schedule: ActionTable,
        *,
        devices: Sequence[jax.Device],
        home: jax.Device | None = None,
    ) -> None:
        started = time.perf_counter()
        self.stages = tuple(range(program.num_stages))
        self._home = devices[0] if home is None else home
        placed = [devices[rank % len(devices)] for rank in schedule.placement]
        self.arrays = JaxArrays(placed)
        tasks = {
            (stage, kind): compile_task(graph, device=placed[stage])
            for stage, kind, graph in task_graphs(program, self.stages)
        }
        pairs = {
            pair: parted_pair(program, pair, partial(compile_task, device=placed[pair[0]]))
            for pair in pairs_here(program, self.stages)
        }
        self._plan = Plan(program, self.stages, tasks, self.arrays, pairs)
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
        with jax.enable_x64(True):
            step = Step(self._plan, inputs)
            for action in self._order:
                if inputs.backward or action.kind.forward:
                    step.compute(action)
            grads = add_shared(self._plan.program, step.gradients(), self.arrays)
            return StepOutputs(
                loss=_sum_losses(step.losses(), inputs.loss_grad),
                grads=beside(grads, inputs.params, self._home),
                buffers=step.buffers(),
                aux=step.aux(),
            )

    def profile(self, inputs: StepInputs) -> Times:
        """Times of some steps run task by task, each waited for, and of moves between devices."""
        timer = TaskTimer(jax.block_until_ready)
        with jax.enable_x64(True):
            for step in timer.steps(self._plan, inputs):
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
        with jax.enable_x64(True):
            step = Step(self._plan, inputs)
            spans = dispatch(step, self._order, self._placement, jax.block_until_ready)
        return by_rank(spans, self._placement, began)

    def _move_seconds(self, types: Sequence[TensorType], source: int, target: int) -> float:
        """How long a message takes to another device."""
        arrays = [self.arrays.zeros(type, source) for type in types]
        target = stage_elsewhere(self._placement, source, target)

        def move() -> None:
            for moved in [self.arrays.move(array, target) for array in arrays]:
                moved.block_until_ready()

        return median_seconds(move)


def _sum_losses(losses: Sequence[jax.Array], scale: float) -> jax.Array:
    """The sum in microbatch order, times the scale, in the loss's dtype."""
    total = jnp.zeros_like(losses[0])
    for loss in losses:
        total = total + loss
    return total * jnp.asarray(scale, total.dtype)
