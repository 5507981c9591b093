"""Measuring tasks: how long F, I and W of each stage take."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from plait.backends.runtime import Plan, Task
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.times import Times

PROFILE_ROUNDS = 3


class TaskTimer:
    """Wraps the tasks of a plan so that each call is timed; `wait` waits for the arrays it is given."""

    def __init__(self, program: Program, wait: Callable[[Any], object]) -> None:
        self._num_stages = program.num_stages
        self._wait = wait
        self._samples: dict[tuple[int, TaskKind], list[float]] = {}

    def timed(self, plan: Plan) -> Plan:
        """The plan with timed tasks."""
        tasks = {key: self._wrap(key, task) for key, task in plan.tasks.items()}
        return Plan(plan.program, plan.stages, tasks, plan.arrays)

    def _wrap(self, key: tuple[int, TaskKind], task: Task) -> Task:
        def run(operands: list[Any]) -> Any:
            self._wait(operands)
            started = time.perf_counter()
            outputs = task(operands)
            self._wait(outputs)
            self._samples.setdefault(key, []).append(time.perf_counter() - started)
            return outputs

        return run

    def medians(self) -> dict[tuple[int, TaskKind], float]:
        """The median seconds of each task that ran."""
        return {key: statistics.median(samples) for key, samples in self._samples.items()}

    def include(self, medians: dict[tuple[int, TaskKind], float]) -> None:
        """Take in what another process measured."""
        for key, sample in medians.items():
            self._samples.setdefault(key, [sample])

    def times(self, comm: float) -> Times:
        """Times by stage; a task that never ran (an empty one) takes no time."""
        medians = self.medians()
        f, i, w = (
            [medians.get((stage, kind), 0.0) for stage in range(self._num_stages)]
            for kind in ("F", "I", "W")
        )
        return Times(f=f, i=i, w=w, comm=comm)
