"""The spmd engine against the tasks interpreted one by one, and bit for bit against the tasks compiled one by one."""

import dataclasses

import jax
import numpy as np
import pytest
from stage_programs import inputs_for, layers, meaning

from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.engine_spmd import SpmdEngine
from plait.backends.runtime import StepInputs, StepOutputs
from plait.core_ir.program import Program
from plait.core_ir.schedule import Schedule, build

PROGRAMS: dict[str, Program] = {
    "alike": layers([3] * 5),
    "one": layers([3, 3]),
    "unlike": layers([4, 4, 6, 3], vocabulary=7),
    "skip": layers([3] * 5, skip=(0, 2)),
    "frozen": layers([3] * 5, frozen=(0, 2)),
    "all_frozen_but_first": layers([3] * 4, frozen=(1, 2)),
    "all_frozen_but_last": layers([3] * 4, frozen=(0, 1)),
    "tied": layers([3] * 4, shared=(0, 2)),
}
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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step(name: str, schedule: str) -> None:
    program, num_microbatches = PROGRAMS[name], 3
    inputs = inputs_for(program, num_microbatches)
    engine = SpmdEngine(program, build(schedule, program.num_stages, num_microbatches))
    outputs = engine.run(inputs)
    check(outputs, program, inputs)
    check_bits(outputs, one_by_one(program, num_microbatches).run(inputs))
