"""Measuring: how long the tasks of each stage take, and when the actions of a step run."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from plait.backends.runtime import Plan, Spans, Step, Task, TaskOf, awaited, tasks_of
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.times import Times

PROFILE_ROUNDS = 3

Wait = Callable[[Any], object]
"""Returns once the arrays it is given are there."""


class TaskTimer:
    """Wraps the tasks of a plan so that each call is timed."""

    def __init__(self, program: Program, wait: Wait) -> None:
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


class Span(NamedTuple):
    """When one compute action ran, by this process's `time.perf_counter`."""

    action: Action
    start: float
    end: float


class Recorder:
    """Runs the compute actions of a step, each waited for, and notes when they run. The step begins now."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self.spans: list[Span] = []
        self.began = time.perf_counter()

    def run(self, step: Step, action: Action) -> None:
        """Run one action."""
        started = time.perf_counter()
        self._wait(step.compute(action))
        self.spans.append(Span(action, started, time.perf_counter()))

    def shifted(self, seconds: float) -> list[Span]:
        """The spans by a clock that is so much ahead."""
        return [Span(action, start + seconds, end + seconds) for action, start, end in self.spans]


def dispatch(
    step: Step, order: Iterable[Action], placement: Sequence[int], wait: Wait
) -> list[Span]:
    """Run the compute actions of a step that only begins them, as fast as it takes them; when each was at work.

    A thread of each rank waits for what its actions make, one after the other. An action starts when it has been
    dispatched, the one before it on its rank is done, and so is every task it reads from.
    """

    def when_there(made: list[Any]) -> float:
        wait(made)
        return time.perf_counter()

    with ExitStack() as stack:
        threads = {rank: stack.enter_context(ThreadPoolExecutor(1)) for rank in set(placement)}
        begun = []
        for action in order:
            now, made = time.perf_counter(), step.compute(action)
            begun.append((action, now, threads[_rank(action, placement)].submit(when_there, made)))
    spans: list[Span] = []
    task_end: dict[TaskOf, float] = {}
    rank_end: dict[int, float] = {}
    for action, now, done in begun:
        rank = _rank(action, placement)
        read = (task_end[task] for task in awaited(action, step.plan.program))
        start = max(now, rank_end.get(rank, now), *read)
        end = max(start, done.result())
        rank_end[rank] = end
        task_end.update(dict.fromkeys(tasks_of(action), end))
        spans.append(Span(action, start, end))
    return spans


def by_rank(spans: Iterable[Span], placement: Sequence[int], began: float) -> Spans:
    """Spans in seconds from `began`, by rank."""
    rows: list[list[tuple[float, float]]] = [[] for _ in range(max(placement) + 1)]
    for action, start, end in spans:
        rows[_rank(action, placement)].append((start - began, end - began))
    return rows


def _rank(action: Action, placement: Sequence[int]) -> int:
    assert action.stage is not None, action
    return placement[action.stage]
