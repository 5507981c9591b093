"""The `local` engine: all ranks in this process, tasks one after another in dependency order.

For notebooks, debugging, and one GPU.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plait.backends.order import is_forward, linear_order
from plait.backends.parts import pairs_here, parted_pair
from plait.backends.runtime import Begin, Plan, Spans, StepInputs, StepOutputs, task_graphs
from plait.backends.spans import Recorder, by_rank
from plait.backends.step import Step, add_shared
from plait.backends.timing import TaskTimer, task_times
from plait.backends.torch.arrays import to_torch, torch_dtype
from plait.backends.torch.compile import compile_task
from plait.backends.torch.emit import begin
from plait.core_ir.program import STEP_KINDS, Program, TaskKind
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.times import Times
from plait.core_ir.types import KEY, TensorType


class TorchArrays:
    """Tensors on one device, as the runtime handles them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, type: TensorType, stage: int) -> torch.Tensor:
        """Zeros of a type."""
        return torch.zeros(type.shape, dtype=torch_dtype(type.dtype), device=self.device)

    def scalar(self, number: float, type: TensorType, stage: int) -> torch.Tensor:
        """A 0-dim tensor."""
        return torch.full(type.shape, number, dtype=torch_dtype(type.dtype), device=self.device)

    def key(self, words: NDArray[np.uint32], stage: int) -> torch.Tensor:
        """A u32[2] key."""
        return to_torch(words, KEY, self.device)

    def add(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """total + part, in place."""
        return total.add_(part)

    def move(self, array: Any, stage: int) -> torch.Tensor:
        """The array as a contiguous tensor on the device, copied only where it must be."""
        return to_torch(array, None, self.device)

    def stack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Along a new dim 0."""
        return torch.stack(list(parts))

    def wait(self, _: object = None) -> None:
        """Wait until the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compile_plan(
    program: Program, stages: tuple[int, ...], *, device: torch.device, codegen: str
) -> Plan:
    """Compile F, I and W of some stages, and F&B of their pairs; equal graphs share one artifact."""
    tasks = {
        (stage, kind): compile_task(graph, codegen=codegen, device=device)
        for stage, kind, graph in task_graphs(program, stages)
    }
    pairs = {
        pair: parted_pair(program, pair, partial(compile_task, codegen=codegen, device=device))
        for pair in pairs_here(program, stages)
    }
    step_tasks: dict[tuple[int, TaskKind], Begin] = {
        (stage, kind): partial(begin, graph, device=device)
        for stage in stages
        for kind, graph in program.stages[stage].tasks.items()
        if kind in STEP_KINDS
    }
    return Plan(program, stages, tasks, TorchArrays(device), pairs, step_tasks)


class LocalEngine:
    """Runs the compute actions of all ranks in one process."""

    def __init__(
        self, program: Program, schedule: ActionTable, *, device: torch.device, codegen: str
    ) -> None:
        started = time.perf_counter()
        self.stages = tuple(range(program.num_stages))
        self.arrays = TorchArrays(device)
        self._plan = compile_plan(program, self.stages, device=device, codegen=codegen)
        self.reschedule(schedule)
        self.compile_seconds = time.perf_counter() - started

    def reschedule(self, schedule: ActionTable) -> None:
        """Go on under another order of the same tasks."""
        self._order = linear_order(schedule, self._plan.program)
        self._placement = schedule.placement

    def agree(self, error: Exception | None) -> None:
        """Raise `error`."""
        if error is not None:
            raise error

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step."""
        step = Step(self._plan, inputs)
        for action in self._order:
            if inputs.backward or is_forward(action):
                step.compute(action)
        step.end_reductions()
        return collect(step)

    @torch.no_grad()
    def profile(self, inputs: StepInputs) -> Times:
        """Times of some steps run task by task; on one device a transfer costs nothing."""
        timer = TaskTimer(self.arrays.wait)
        for step in timer.steps(self._plan, inputs):
            for action in self._order:
                step.compute(action)
            step.end_reductions()
        return task_times(timer.rounds, len(self.stages), timer.pair_rounds)

    @torch.no_grad()
    def measure(self, inputs: StepInputs) -> Spans:
        """As the actions of all ranks took turns here."""
        self.run(inputs)
        recorder = Recorder(self.arrays.wait)
        step = Step(self._plan, inputs)
        for action in self._order:
            recorder.run(step, action)
        step.end_reductions()
        return by_rank(recorder.spans, self._placement, recorder.began)


def collect(step: Step) -> StepOutputs:
    """The outputs of a step all of whose stages ran in this process."""
    plan = step.plan
    return StepOutputs(
        loss=sum_losses(step.losses(), step.inputs.loss_grad),
        grads=add_shared(step.gradients(), plan.arrays),
        buffers=step.buffers(),
        aux=step.aux(),
    )


def sum_losses(losses: Sequence[torch.Tensor], scale: float) -> torch.Tensor | None:
    """The sum in microbatch order, times the scale; None for no loss."""
    if not losses:
        return None
    total = torch.zeros_like(losses[0])
    for loss in losses:
        total = total + loss
    return total * scale
