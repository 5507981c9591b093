"""The spmd engine against the tasks interpreted one by one, and bit for bit against the tasks compiled one by one."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from stage_programs import (
    PROGRAMS,
    Task,
    every_kind_of_value,
    inputs_for,
    layers,
    meaning,
    rows_of_one_weight,
)

from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.engine_spmd import SpmdEngine
from plait.backends.runtime import StepInputs, StepOutputs
from plait.core_ir.errors import BatchError, ScheduleError, UnsupportedError, UsageError
from plait.core_ir.program import Program, Stage
from plait.core_ir.schedule import Action, Schedule, build
from plait.core_ir.schedule.kinds import B, F, I, W
from plait.core_ir.types import TensorType, f32

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def check(outputs: StepOutputs, program: Program, inputs: StepInputs) -> None:
    expected = meaning(program, inputs)
    np.testing.assert_allclose(np.asarray(outputs.loss), expected["loss"], rtol=1e-5)
    for group in ("grads", "buffers", "aux"):
        got = getattr(outputs, group)
        assert set(got) == set(expected[group]), group
        for name, want in expected[group].items():
            error = np.abs(np.asarray(got[name], np.float64) - np.asarray(want, np.float64))
            scale = np.abs(np.asarray(want, np.float64)).max(initial=1e-3)
            assert got[name].dtype == want.dtype
            assert error.max(initial=0) <= 1e-5 * scale, f"{group} {name}"


def check_bits(outputs: StepOutputs, others: StepOutputs) -> None:
    got, want = (jax.tree.map(np.asarray, dataclasses.asdict(o)) for o in (outputs, others))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def one_by_one(program: Program, num_microbatches: int) -> MpmdEngine:
    schedule = build("gpipe", program.num_stages, num_microbatches)
    return MpmdEngine(program, schedule, devices=jax.devices()[:1])


# Each program under one schedule, and two of them under all.
STEPS = [
    *zip(PROGRAMS, itertools.cycle(SCHEDULES)),
    *(("unlike", schedule) for schedule in ("gpipe", "1f1b")),
    *(("skip", schedule) for schedule in ("1f1b", "zb-h1")),
]


@pytest.mark.parametrize(("name", "schedule"), STEPS)
def test_a_step(name: str, schedule: str) -> None:
    program, num_microbatches = PROGRAMS[name], 3
    inputs = inputs_for(program, num_microbatches)
    engine = SpmdEngine(program, build(schedule, program.num_stages, num_microbatches))
    outputs = engine.run(inputs)
    check(outputs, program, inputs)
    check_bits(outputs, one_by_one(program, num_microbatches).run(inputs))


def of_ranks(num_ranks: int, placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """GPipe of stages placed anyhow: every rank runs its tasks in the order of stages, W last of each."""
    stages = range(len(placement))
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for m in range(num_microbatches):
        for s in stages:
            rows[placement[s]].append(Action(F, s, m))
    for m in range(num_microbatches):
        for s in reversed(stages):
            rows[placement[s]].append(Action(B if s % 2 else I, s, m))
        for s in stages:
            if not s % 2:
                rows[placement[s]].append(Action(W, s, m))
    return Schedule.from_actions("placed", placement, num_microbatches, rows)


@pytest.mark.parametrize(
    ("num_ranks", "placement"),
    [(1, (0, 0, 0, 0)), (2, (0, 1, 1, 0)), (2, (0, 1, 0, 1)), (4, (2, 0, 3, 1)), (3, (0, 0, 2, 2))],
)
@pytest.mark.parametrize("name", ["skip", "tied", "frozen"])
def test_several_stages_a_rank_in_any_place(
    name: str, num_ranks: int, placement: tuple[int, ...]
) -> None:
    program = {**PROGRAMS, "tied": layers([3] * 5, shared=(0, 1, 3))}[name]
    inputs = inputs_for(program, 2)
    engine = SpmdEngine(program, of_ranks(num_ranks, placement, 2))
    outputs = engine.run(inputs)
    check(outputs, program, inputs)
    check_bits(outputs, one_by_one(program, 2).run(inputs))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 5, 6])
def test_numbers_of_microbatches(num_microbatches: int) -> None:
    program = PROGRAMS["skip"]
    inputs = inputs_for(program, num_microbatches)
    engine = SpmdEngine(program, build("zb-h1", 4, num_microbatches))
    check(engine.run(inputs), program, inputs)


def test_forward_only_keeps_nothing_for_a_backward() -> None:
    program = PROGRAMS["unlike"]
    inputs = dataclasses.replace(inputs_for(program, 3), backward=False)
    engine = SpmdEngine(program, build("1f1b", 3, 3))
    outputs = engine.run(inputs)
    check(outputs, program, inputs)
    assert outputs.grads == {}
    kept = engine.plan(backward=False).num_rows
    assert not any(pool.startswith(("saved", "handover", "gradient", "grads")) for pool in kept)


def test_more_ranks_than_devices_is_an_error_that_helps() -> None:
    program = PROGRAMS["alike"]
    with pytest.raises(UsageError, match="xla_force_host_platform_device_count=4"):
        SpmdEngine(program, build("gpipe", 4, 2), devices=jax.devices()[:3])


def test_a_schedule_that_cannot_run_names_who_waits() -> None:
    program = layers([3, 3, 3])
    rows = [[Action(B, 0, 0), Action(F, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]]
    with pytest.raises(ScheduleError, match="rank 0 at 0I0"):
        SpmdEngine(program, Schedule.from_actions("wrong", (0, 1), 1, rows))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zbv", "dualpipev"])
def test_two_stages_a_rank(name: str) -> None:
    program, num_microbatches = layers([3] * 5, skip=(0, 2)), 4
    schedule = build(name, 2, num_microbatches)
    inputs = inputs_for(program, num_microbatches)
    outputs = SpmdEngine(program, schedule).run(inputs)
    check(outputs, program, inputs)
    check_bits(outputs, one_by_one(program, num_microbatches).run(inputs))


def test_a_lowered_schedule_runs_as_it_did_before() -> None:
    program = PROGRAMS["skip"]
    inputs, schedule = inputs_for(program, 2), build("1f1b", 4, 2)
    lowered = schedule.lower(program.edge_kinds())
    assert lowered.is_lowered
    check_bits(SpmdEngine(program, lowered).run(inputs), SpmdEngine(program, schedule).run(inputs))


def test_partial_gradients_of_a_shared_parameter_are_added_once() -> None:
    """x = 0..7 as one row for each of four ranks, loss = sum of x w: the gradient of w is [12, 16], not [48, 64]."""
    program = rows_of_one_weight(4)
    inputs = StepInputs(
        params={"w": np.array([1, 2], np.float32)},
        buffers={},
        microbatches=[{f"x{r}": np.arange(2 * r, 2 * r + 2, dtype=np.float32) for r in range(4)}],
        keys=np.zeros((1, 2), np.uint32),
        loss_grad=1.0,
    )
    outputs = SpmdEngine(program, build("gpipe", 4, 1)).run(inputs)
    np.testing.assert_array_equal(np.asarray(outputs.grads["w"]), [12, 16])
    np.testing.assert_array_equal(np.asarray(outputs.loss), 44)


def test_profile_gives_times_of_each_stage() -> None:
    program = PROGRAMS["alike"]
    times = SpmdEngine(program, build("1f1b", 4, 2)).profile(inputs_for(program, 2))
    assert np.all(np.asarray(times.f) > 0)
    assert np.shape(times.f) == (4,)


def test_a_buffer_that_two_stages_use_and_one_changes_is_refused() -> None:
    program = every_kind_of_value()
    other = layers([3, 3]).stages[0].tasks
    reader = Task("reader")
    reader.output(reader.read("buffer", "mean", TensorType(f32, (3,))), "aux", "mean")
    stage = Stage(
        2, {**other, "F": reader.build(), "I": Task("none").build(), "W": Task("none").build()}
    )
    program = dataclasses.replace(program, stages=(*program.stages, stage))
    with pytest.raises(
        UnsupportedError, match="buffer 'mean' is changed in stage 0 and used in stage 2"
    ):
        SpmdEngine(program, build("gpipe", 3, 1))


def test_calling_twice_gives_the_same_and_keeps_the_callers_arrays() -> None:
    program = PROGRAMS["every_kind_of_value"]
    inputs = inputs_for(program, 2)
    with jax.enable_x64(True):
        given = dataclasses.replace(
            inputs,
            params={name: jax.device_put(x) for name, x in inputs.params.items()},
            buffers={name: jax.device_put(x) for name, x in inputs.buffers.items()},
        )
    engine = SpmdEngine(program, build("1f1b", 2, 2))
    first, second = engine.run(given), engine.run(given)
    check_bits(first, second)
    for group, kept in ((given.params, inputs.params), (given.buffers, inputs.buffers)):
        for name, x in group.items():
            np.testing.assert_array_equal(np.asarray(x), kept[name])


def test_a_schedule_without_a_task_is_an_error() -> None:
    program = layers([3, 3, 3])
    rows = [[Action(F, 0, 0), Action(B, 0, 0)], [Action(F, 1, 0), Action(I, 1, 0)]]
    with pytest.raises(ScheduleError, match="never runs 1W0"):
        SpmdEngine(program, Schedule.from_actions("short", (0, 1), 1, rows))


def test_another_number_of_microbatches_is_an_error_naming_both() -> None:
    program = layers([3, 3])
    engine = SpmdEngine(program, build("gpipe", 1, 2))
    with pytest.raises(BatchError, match="got 3 microbatches, and the schedule 'gpipe' has 2"):
        engine.run(inputs_for(program, 3))


def test_eight_ranks() -> None:
    program, num_microbatches = layers([3] * 9), 5
    inputs = inputs_for(program, num_microbatches)
    check(SpmdEngine(program, build("zb-h1", 8, num_microbatches)).run(inputs), program, inputs)
