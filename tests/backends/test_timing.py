"""Measured task times: what each task took, with the runtime's own work, whatever else ran."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_arrays import numpy_plan
from stage_programs import inputs_for, layers, meaning

from plait.backends import timing
from plait.backends.order import linear_order
from plait.backends.runtime import add_shared
from plait.backends.timing import TaskTimer, median_seconds
from plait.core_ir.program import TaskKind
from plait.core_ir.schedule import build


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(timing, "time", own)
    return own


def test_tasks_are_timed_and_give_what_they_give(clock: Clock) -> None:
    program = layers([3, 3, 3])
    plan, inputs = numpy_plan(program), inputs_for(program, 4)
    slow: dict[tuple[int, TaskKind], float] = {(0, "F"): 0.01, (1, "W"): 0.02}
    tasks = dict(plan.tasks)
    for key, seconds in slow.items():
        plan.tasks[key] = _slowed(tasks[key], lambda s=seconds: clock.sleep(s))  # type: ignore[index]
    timer = TaskTimer(2, lambda arrays: None)
    step = timer.step(plan, inputs)
    for action in linear_order(build("1f1b", 2, 4), program):
        step.compute(action)
    times = timer.times(comm=0.5, transfer={(0, 1): 0.25})
    found = {"F": times.f, "I": times.i, "W": times.w}
    for kind, by_stage in found.items():
        for stage, seconds in enumerate(by_stage):  # type: ignore[arg-type]
            wanted_seconds = slow.get((stage, kind), 0)  # type: ignore[call-overload]
            assert seconds == pytest.approx(wanted_seconds)
    assert (times.comm, times.transfer) == (0.5, {(0, 1): 0.25})
    wanted = meaning(program, inputs)["grads"]
    for name, grad in add_shared(program, step.gradients(), plan.arrays).items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-6)


def _slowed(task: Any, sleep: Callable[[], None]) -> Any:
    def run(operands: list[Any]) -> Any:
        sleep()
        return task(operands)

    return run


def test_a_wait_belongs_to_the_task_whose_results_it_waits_for(clock: Clock) -> None:
    program = layers([3, 3, 3])
    timer = TaskTimer(2, lambda arrays: clock.sleep(4.0) if arrays else None)
    step = timer.step(numpy_plan(program), inputs_for(program, 1))
    for action in linear_order(build("zb-h1", 2, 1), program):
        step.compute(action)
    medians = timer.medians()
    assert sorted(medians) == [(stage, kind) for stage in (0, 1) for kind in "FIW"]
    # stage 0 has no input gradient: its I makes nothing, and nothing has been added to yet
    assert all(seconds == 4.0 for key, seconds in medians.items() if key != (0, "I"))


def test_times_of_other_processes_are_taken_in() -> None:
    timer = TaskTimer(2, lambda arrays: None)
    timer.include({(0, "F"): 1.0, (0, "I"): 2.0})
    timer.include({(0, "F"): 9.0, (1, "W"): 3.0})
    times = timer.times()
    assert (times.f, times.i, times.w) == ((1.0, 0.0), (2.0, 0.0), (0.0, 3.0))


def test_median_seconds(clock: Clock) -> None:
    waits = iter([20.0, 2.0, 3.0])
    assert median_seconds(lambda: clock.sleep(next(waits)), 3) == 3.0
