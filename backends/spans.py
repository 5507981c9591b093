"""Measuring when the compute actions of a step run."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from plait.backends.order import TaskOf, awaited, tasks_of
from plait.backends.runtime import Spans
from plait.backends.step import Step
from plait.backends.timing import Wait
from plait.core_ir.schedule.ir import Action


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
        """Run one action; what computes nothing is not noted."""
        if not action.kind.is_compute:
            step.compute(action)
            return
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
            if not action.kind.is_compute:
                continue
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
