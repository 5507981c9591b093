"""Measuring how long the tasks of each stage take, and messages between stages."""

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from plait.backends.runtime import Plan, Step, StepInputs
from plait.core_ir.program import TaskKind
from plait.core_ir.schedule.times import PerEdge, Times

PROFILE_ROUNDS = 3
TRANSFER_ROUNDS = 10

Wait: TypeAlias = Callable[[Any], object]
"""Returns once the arrays it is given are there."""


class TaskTimer:
    """Makes steps that time their tasks, with all that the runtime does for each."""

    def __init__(self, num_stages: int, wait: Wait) -> None:
        self._num_stages = num_stages
        self._wait = wait
        self._samples: dict[tuple[int, TaskKind], list[float]] = {}

    def step(self, plan: Plan, inputs: StepInputs) -> Step:
        """A step whose tasks are timed."""
        return _TimedStep(plan, inputs, self._wait, self._samples)

    def medians(self) -> dict[tuple[int, TaskKind], float]:
        """The median seconds of each task that ran."""
        return {key: statistics.median(samples) for key, samples in self._samples.items()}

    def include(self, medians: dict[tuple[int, TaskKind], float]) -> None:
        """Take in what another process measured."""
        for key, sample in medians.items():
            self._samples.setdefault(key, [sample])

    def times(self, comm: float = 0.0, transfer: PerEdge = 0.0) -> Times:
        """Times by stage."""
        medians = self.medians()
        f, i, w = (
            [medians.get((stage, kind), 0.0) for stage in range(self._num_stages)]
            for kind in ("F", "I", "W")
        )
        return Times(f=f, i=i, w=w, comm=comm, transfer=transfer)


class _TimedStep(Step):
    """Waits for what a task reads, then notes how long it takes until all it makes and adds to is there."""

    def __init__(
        self,
        plan: Plan,
        inputs: StepInputs,
        wait: Wait,
        samples: dict[tuple[int, TaskKind], list[float]],
    ) -> None:
        super().__init__(plan, inputs)
        self._wait, self._samples = wait, samples

    def run_task(self, stage: int, kind: TaskKind, microbatch: int) -> Any:
        self._wait(list(self._envs.get((stage, microbatch), {}).values()))
        started = time.perf_counter()
        made = super().run_task(stage, kind, microbatch)
        self._wait([*made, *self.gradients().values()])
        self._samples.setdefault((stage, kind), []).append(time.perf_counter() - started)
        return made


def median_seconds(run: Callable[[], object], num_rounds: int = TRANSFER_ROUNDS) -> float:
    """How long a call takes."""
    samples = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
