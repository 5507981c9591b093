"""Measured task times: what each task took, with the runtime's own work, whatever else ran."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_arrays import numpy_plan
from stage_programs import inputs_for, layers, meaning

from plait.backends import timing
from plait.backends.order import linear_order
from plait.backends.step import add_shared
from plait.backends.timing import TaskRun, TaskTimer, median_seconds, task_times, transfer_times
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
    timer = TaskTimer(lambda arrays: None)
    [step] = timer.steps(plan, inputs, 1)
    for action in linear_order(build("1f1b", 2, 4), program):
        step.compute(action)
    times = task_times(timer.rounds, 2, comm=0.5, transfer={(0, 1): 0.25})
    found = {"F": times.f, "I": times.i, "W": times.w}
    for kind, by_stage in found.items():
        for stage, seconds in enumerate(by_stage):  # type: ignore[arg-type]
            wanted_seconds = slow.get((stage, kind), 0)  # type: ignore[call-overload]
            assert seconds == pytest.approx(wanted_seconds)
    assert (times.comm, times.transfer) == (0.5, {(0, 1): 0.25})
    wanted = meaning(program, inputs)["grads"]
    for name, grad in add_shared(step.gradients(), plan.arrays).items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-6)


def _slowed(task: Any, sleep: Callable[[], None]) -> Any:
    def run(operands: list[Any]) -> Any:
        sleep()
        return task(operands)

    return run


def test_a_wait_belongs_to_the_task_whose_results_it_waits_for(clock: Clock) -> None:
    program = layers([3, 3, 3])
    timer = TaskTimer(lambda arrays: clock.sleep(4.0) if arrays else None)
    [step] = timer.steps(numpy_plan(program), inputs_for(program, 1), 1)
    for action in linear_order(build("zb-h1", 2, 1), program):
        step.compute(action)
    [runs] = timer.rounds
    seconds = {(run.task[1], run.task[0]): run.end - run.start for run in runs}
    assert sorted(seconds) == [(stage, kind) for stage in (0, 1) for kind in "FIW"]
    # stage 0 has no input gradient: its I makes nothing, and nothing has been added to yet
    assert all(found == 4.0 for key, found in seconds.items() if key != (0, "I"))


def test_a_task_takes_the_mean_of_a_round_and_the_median_of_rounds() -> None:
    rounds = [
        [TaskRun(("F", 0, 0), 0.0, 1.0), TaskRun(("F", 0, 1), 1.0, 6.0)],  # mean 3
        [TaskRun(("F", 0, 0), 0.0, 2.0), TaskRun(("W", 1, 0), 5.0, 9.0)],  # 2, and the only W
        [TaskRun(("F", 0, 0), 0.0, 90.0), TaskRun(("F", 0, 1), 90.0, 100.0)],  # 50: an outlier
    ]
    times = task_times(rounds, 2)
    assert (times.f, times.i, times.w) == ((3.0, 0.0), (0.0, 0.0), (0.0, 4.0))


def test_a_pair_takes_what_it_took_as_one() -> None:
    rounds = [[TaskRun((kind, stage, 0), 0.0, 1.0) for kind in "FIW" for stage in (0, 1)]]  # type: ignore[arg-type]
    times = task_times(rounds, 2, [[(0, 2.0), (0, 3.0)], [(0, 2.0)], [(0, 9.0)]])
    assert times.fb == (
        2.5,
        3.0,
    )  # of a forward in stage 1 there was none: its tasks one after the other


def test_a_message_takes_as_long_as_its_rank_waited_for_it() -> None:
    program = layers([3, 3, 3])
    runs = [
        TaskRun(("F", 0, 0), 0.0, 2.0),
        TaskRun(("F", 0, 1), 2.0, 4.0),
        TaskRun(("F", 1, 0), 2.5, 4.1),  # the first task of its rank: when it was free is not known
        TaskRun(("F", 1, 1), 4.6, 6.0),  # free at 4.1, sent at 4.0, takes 0.2 at least: 0.6
        TaskRun(("I", 1, 0), 6.0, 7.0),
        TaskRun(("W", 1, 0), 7.0, 7.5),
        TaskRun(("I", 0, 0), 7.75, 8.5),  # waits since 4.0 for what was sent at 7.0: 0.75
        TaskRun(("I", 1, 1), 7.5, 8.0),
        TaskRun(("W", 0, 0), 8.5, 9.0),
        TaskRun(("I", 0, 1), 9.0, 9.5),  # sent at 8.0, there before its rank was free: nothing told
    ]
    alone = {(0, 1): 0.2, (1, 0): 0.2}
    assert transfer_times([runs], program, (0, 1), alone) == {
        (0, 1): pytest.approx(0.6),
        (1, 0): pytest.approx(0.75),
    }
    assert transfer_times([runs[:3]], program, (0, 1), alone) == alone
    assert transfer_times([runs], program, (0, 0), alone) == alone


def test_median_seconds(clock: Clock) -> None:
    waits = iter([20.0, 2.0, 3.0])
    assert median_seconds(lambda: clock.sleep(next(waits)), 3) == 3.0
