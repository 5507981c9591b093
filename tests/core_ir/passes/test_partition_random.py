"""Random joint programs, cut and split, run task by task like the whole."""

import numpy as np
from hypothesis import example, given, settings
from joint_programs import random_inputs, run_joint, run_program
from random_joint_programs import FROZEN, STEPS, Step, build

from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.split_backward import split_backward
from plait.core_ir.verify import verify, verify_program


# A buffer that stage 0 reads, of a module whose other buffer stage 1 updates.
@example(steps=[("buffer", 2, 0), ("cut", 0, 0), ("buffer", 0, 1)], frozen=set())
@settings(max_examples=300, deadline=None)
@given(steps=STEPS, frozen=FROZEN)
def test_tasks_give_what_the_joint_program_gives(steps: list[Step], frozen: set[int]) -> None:
    joint = build(steps, frozen)
    verify(joint.graph)
    inputs = random_inputs(joint.graph)
    expected = run_joint(joint.graph, inputs)
    program = verify_program(split_backward(partition_stages(joint.graph, joint.num_stages)))
    for backward in (("B",), ("I", "W")):
        found = run_program(program, inputs, backward)
        assert found.keys() == expected.keys()
        for port, array in expected.items():
            np.testing.assert_array_equal(found[port], array, err_msg=str(port))
    for stage in program.stages:
        for task in stage.tasks.values():
            assert not any(eqn.op is boundary for eqn in task.eqns)
