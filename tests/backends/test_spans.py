"""Measured timelines: every action once, in its rank's order, after what it reads."""

import time
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy_arrays import numpy_plan
from stage_programs import inputs_for, layers
from torch import nn

import plait
from plait.backends.order import awaited, linear_order, tasks_of
from plait.backends.spans import Recorder, Span, by_rank, dispatch
from plait.backends.step import Step
from plait.core_ir.errors import UsageError
from plait.core_ir.program import Program
from plait.core_ir.schedule import Schedule, build
from plait.core_ir.schedule.timeline import Timeline

NUM_MICROBATCHES = 4


def loss_fn(p: Any, batch: Any) -> Any:
    h = batch["x"]
    for stage in range(4):
        h = (plait.stage_boundary(h) if stage else h) @ p[f"w{stage}"]
    return (h * h).mean()


def batch() -> Any:
    return {"x": np.ones((2 * NUM_MICROBATCHES, 8), np.float32)}


def compiled(engine: str, schedule: str = "zbv") -> plait.Pipeline:
    options: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "num_ranks": 2}
    options |= {"schedule": schedule, "engine": engine}
    if engine == "local":
        model = nn.ParameterDict({f"w{s}": nn.Parameter(torch.eye(8)) for s in range(4)})
        tensors = {"x": torch.tensor(batch()["x"])}
        return plait.compile(loss_fn, model, tensors, codegen="eager", **options)
    return plait.compile(loss_fn, {f"w{s}": jnp.eye(8) for s in range(4)}, batch(), **options)


def check_order(timeline: Timeline, program: Program) -> None:
    """Every action after what it reads and after the one before it on its rank."""
    assert timeline.start.min() >= 0
    assert (timeline.end >= timeline.start).all()
    assert timeline.makespan > 0
    end = {task: one.end for one in timeline.tasks for task in tasks_of(one.action)}
    for one in timeline.tasks:
        for task in awaited(one.action, program):
            assert end[task] <= one.start
    for before, after in pairwise(timeline.tasks):
        assert before.rank != after.rank or before.end <= after.start


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])  # the latter has pairs of actions
@pytest.mark.parametrize("engine", ["local", "mpmd"])
def test_a_measured_step(engine: str, schedule: str) -> None:
    pipeline = compiled(engine, schedule)
    timeline = pipeline.measure(batch())
    assert timeline.schedule == pipeline.schedule
    check_order(timeline, pipeline.program)
    if engine == "local":  # one process: the ranks take turns
        spans = sorted(zip(timeline.start, timeline.end, strict=True))
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_measuring_writes_nothing() -> None:
    model = nn.ParameterDict({f"w{s}": nn.Parameter(torch.eye(8)) for s in range(4)})
    tensors = {"x": torch.tensor(batch()["x"])}
    pipeline = plait.compile(
        loss_fn, model, tensors, num_microbatches=NUM_MICROBATCHES, codegen="eager"
    )
    pipeline.measure(tensors)
    assert all(parameter.grad is None for parameter in model.values())


def test_one_program_cannot_be_timed_by_action() -> None:
    with pytest.raises(UsageError, match="engine='mpmd'"):
        compiled("spmd").measure(batch())


# The parts, on NumPy, with waits of known length.


def timeline_of(spans: list[Span], schedule: Schedule, began: float) -> Timeline:
    rows = by_rank(spans, schedule.placement, began)
    start, end = np.array([span for row in rows for span in row]).T
    return Timeline(schedule, start, end)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_what_is_dispatched_starts_when_all_it_waits_for_is_done(name: str) -> None:
    program, schedule = layers([3, 3, 3]), build(name, 2, 4)
    step, rng = Step(numpy_plan(program), inputs_for(program, 4)), np.random.default_rng(0)
    seconds = iter(rng.uniform(0, 0.004, schedule.num_actions))
    began = time.perf_counter()
    order = linear_order(schedule, program)
    spans = dispatch(step, order, schedule.placement, lambda made: time.sleep(next(seconds)))
    took = time.perf_counter() - began
    timeline = timeline_of(spans, schedule, began)
    check_order(timeline, program)
    assert timeline.end.max() <= took
    assert len(step.losses()) == 4  # it ran


def test_a_recorded_action_ends_when_it_has_been_waited_for() -> None:
    program, schedule = layers([3, 3, 3]), build("zb-h1", 2, 2)
    step, waited = Step(numpy_plan(program), inputs_for(program, 2)), []

    def wait(made: Any) -> None:
        waited.append(made)
        time.sleep(0.002)

    recorder = Recorder(wait)
    for action in linear_order(schedule, program):
        recorder.run(step, action)
    assert len(waited) == schedule.num_actions
    assert all(one.end - one.start >= 0.002 for one in recorder.spans)
    check_order(timeline_of(recorder.spans, schedule, recorder.began), program)
    later = recorder.shifted(10.0)
    assert [one.start for one in later] == [one.start + 10 for one in recorder.spans]
