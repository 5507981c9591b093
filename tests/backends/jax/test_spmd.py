"""The spmd engine against the tasks interpreted one by one, and bit for bit against the tasks compiled one by one."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from stage_programs import PROGRAMS, inputs_for, layers, meaning

from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.engine_spmd import SpmdEngine
from plait.backends.runtime import StepInputs, StepOutputs
from plait.core_ir.errors import ScheduleError, UsageError
from plait.core_ir.program import Program
from plait.core_ir.schedule import Action, Schedule, build
from plait.core_ir.schedule.kinds import B, F, I, W

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
