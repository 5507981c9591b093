"""What engines share: a program with compiled tasks, what a step reads and gives, what an engine and its arrays can do.

A `Plan` is what does not change between steps; `step.Step` is one step in progress.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.backends.parts import PartedTask, Task
from plait.core_ir.graph import Graph, Port
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times
from plait.core_ir.types import TensorType

Spans: TypeAlias = Sequence[Sequence[tuple[float, float]]]
"""For each rank the start and the end of each of its compute actions, in its order: seconds from the step's start."""


class Arrays(Protocol):
    """What the runtime asks of a backend's arrays."""

    def zeros(self, type: TensorType, stage: int) -> Any:
        """Zeros, where `stage` runs."""

    def scalar(self, number: float, type: TensorType, stage: int) -> Any:
        """A number as an array, where `stage` runs."""

    def key(self, words: NDArray[np.uint32], stage: int) -> Any:
        """A PRNG key, where `stage` runs."""

    def add(self, total: Any, part: Any) -> Any:
        """The sum; `total` belongs to the runtime and may be overwritten."""

    def move(self, array: Any, stage: int) -> Any:
        """The array where `stage` runs."""

    def stack(self, parts: Sequence[Any]) -> Any:
        """The arrays, of one type, along a new dim 0."""


@dataclass(frozen=True)
class StepInputs:
    """What one step reads; no array of it is changed.

    params, buffers: by name, for the stages that run here. microbatches: batch leaves by name. keys: u32[M, 2], a key
    for each microbatch. loss_grad: the cotangent of each microbatch's loss, which also scales the sum of losses.
    """

    params: Mapping[str, Any]
    buffers: Mapping[str, Any]
    microbatches: Sequence[Mapping[str, Any]]
    keys: NDArray[np.uint32]
    loss_grad: float
    backward: bool = True


@dataclass(frozen=True)
class StepOutputs:
    """What one step gives: the loss (None where no stage here has one), gradients by name, buffers by name as the
    step leaves them, and aux by name, stacked by microbatch."""

    loss: Any
    grads: dict[str, Any]
    buffers: dict[str, Any]
    aux: dict[str, Any]


class Engine(Protocol):
    """A compiled program under a schedule, ready to run steps."""

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that run in this process."""

    @property
    def compile_seconds(self) -> float:
        """What compiling the tasks took."""

    @property
    def arrays(self) -> Arrays:
        """The arrays it works on."""

    def agree(self, error: Exception | None) -> None:
        """Raise `error`; where several processes run, raise on each of them what any of them met."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        """Run one step (its forward alone, where `inputs.backward` is false)."""

    def reschedule(self, schedule: Schedule) -> None:
        """Go on under another order of the same tasks, each stage on the rank where it is."""

    def profile(self, inputs: StepInputs) -> Times:
        """Run steps task by task and measure: seconds of F, I and W of each stage, of a transfer, and of gathering and
        reducing what is sharded."""

    def measure(self, inputs: StepInputs) -> Spans:
        """Run one step and note when its compute actions run. UsageError where an engine cannot tell."""


Begin: TypeAlias = Callable[[Sequence[Any]], Callable[[], Sequence[Any]]]
"""A task that is begun, up to where it waits for what it has begun to communicate; what it gives ends it, and gives the
arrays of its outputs."""


@dataclass(frozen=True)
class Plan:
    """A program with compiled tasks for the stages that run here. `tasks[stage, kind]` is F, I or W.

    `pairs[f, b]` is the task F&B of stage f's forward and stage b's backward; a pair that has none runs as B, then F.
    `step_tasks[stage, kind]` is UNSHARD or REDUCE_GRAD, where the stage has one.
    """

    program: Program
    stages: tuple[int, ...]
    tasks: Mapping[tuple[int, TaskKind], Task]
    arrays: Arrays
    pairs: Mapping[tuple[int, int], PartedTask] = field(default_factory=dict)
    step_tasks: Mapping[tuple[int, TaskKind], Begin] = field(default_factory=dict)

    @cached_property
    def _later_reads(self) -> dict[tuple[int, TaskKind], frozenset[Port]]:
        """For each task, the ports that later tasks of its stage read."""
        reads: dict[tuple[int, TaskKind], frozenset[Port]] = {}
        for stage in self.stages:
            later: frozenset[Port] = frozenset()
            for kind in reversed(_ORDER):
                reads[stage, kind] = later
                later |= frozenset(self.program.task(stage, kind).input_ports)
            reads[stage, "B"] = frozenset()
            if any(stage == backward for _, backward in self.pairs):
                reads[stage, "F"] |= frozenset(self.program.task(stage, "B").input_ports)
        return reads

    def gathered(self, stage: int) -> frozenset[str]:
        """The parameters of a stage that are there only once they have been gathered."""
        return self._gathered.get(stage, frozenset())

    @cached_property
    def _gathered(self) -> dict[int, frozenset[str]]:
        return {
            stage: frozenset(name for name, _ in self.program.task(stage, kind).outputs_of("param"))
            for stage, kind in self.step_tasks
            if kind == "UNSHARD"
        }

    def later_reads(self, stage: int, kind: TaskKind, *, backward: bool) -> frozenset[Port]:
        """The ports that tasks of this stage still read once `kind` has run."""
        return self._later_reads[stage, kind] if backward else frozenset()


_ORDER: tuple[TaskKind, ...] = ("F", "I", "W")


def task_graphs(program: Program, stages: Iterable[int]) -> Iterator[tuple[int, TaskKind, Graph]]:
    """The graphs an engine compiles for some stages: F, I and W of each."""
    for stage in stages:
        for kind in _ORDER:
            yield stage, kind, program.task(stage, kind)
