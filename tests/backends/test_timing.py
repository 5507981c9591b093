"""Measured task times: what each task took, with the runtime's own work, whatever else ran."""

import time
from typing import Any

import numpy as np
from numpy_arrays import numpy_plan
from stage_programs import inputs_for, layers, meaning

from plait.backends.order import linear_order
from plait.backends.runtime import add_shared
from plait.backends.timing import TaskTimer, median_seconds
from plait.core_ir.program import TaskKind
from plait.core_ir.schedule import build


def test_tasks_are_timed_and_give_what_they_give() -> None:
    program = layers([3, 3, 3])
    plan, inputs = numpy_plan(program), inputs_for(program, 4)
    slow: dict[tuple[int, TaskKind], float] = {(0, "F"): 0.01, (1, "W"): 0.02}
    tasks = dict(plan.tasks)
    for key, seconds in slow.items():
        plan.tasks[key] = _slowed(tasks[key], seconds)  # type: ignore[index]
    timer = TaskTimer(2, lambda arrays: None)
    step = timer.step(plan, inputs)
    for action in linear_order(build("1f1b", 2, 4), program):
        step.compute(action)
    times = timer.times(comm=0.5, transfer={(0, 1): 0.25})
    found = {"F": times.f, "I": times.i, "W": times.w}
    for kind, by_stage in found.items():
        for stage, seconds in enumerate(by_stage):  # type: ignore[arg-type]
            assert seconds >= slow.get((stage, kind), 0)  # type: ignore[call-overload]
            assert seconds < 0.01 or (stage, kind) in slow
    assert (times.comm, times.transfer) == (0.5, {(0, 1): 0.25})
    wanted = meaning(program, inputs)["grads"]
    for name, grad in add_shared(program, step.gradients(), plan.arrays).items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-6)


def _slowed(task: Any, seconds: float) -> Any:
    def run(operands: list[Any]) -> Any:
        time.sleep(seconds)
        return task(operands)

    return run


def test_a_wait_belongs_to_the_task_whose_results_it_waits_for() -> None:
    program = layers([3, 3, 3])
    timer = TaskTimer(2, lambda arrays: time.sleep(0.004) if arrays else None)
    step = timer.step(numpy_plan(program), inputs_for(program, 1))
    for action in linear_order(build("zb-h1", 2, 1), program):
        step.compute(action)
    medians = timer.medians()
    assert sorted(medians) == [(stage, kind) for stage in (0, 1) for kind in "FIW"]
    # stage 0 has no input gradient: its I makes nothing, and nothing has been added to yet
    assert all(0.004 <= seconds < 0.008 for key, seconds in medians.items() if key != (0, "I"))


def test_times_of_other_processes_are_taken_in() -> None:
    timer = TaskTimer(2, lambda arrays: None)
    timer.include({(0, "F"): 1.0, (0, "I"): 2.0})
    timer.include({(0, "F"): 9.0, (1, "W"): 3.0})
    times = timer.times()
    assert (times.f, times.i, times.w) == ((1.0, 0.0), (2.0, 0.0), (0.0, 3.0))


def test_median_seconds() -> None:
    waits = iter([0.02, 0.002, 0.002])
    assert 0.002 <= median_seconds(lambda: time.sleep(next(waits)), 3) < 0.02
