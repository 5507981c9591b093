"""Every pass on random graphs against the interpreter, with integers: exact in any order."""

import numpy as np
import pytest
from hypothesis import given, settings
from joint_programs import random_inputs, run_joint, run_program
from random_joint_programs import FROZEN, STEPS, Step, build

from plait.core_ir.graph import Graph
from plait.core_ir.ops.collective import all_reduce
from plait.core_ir.passes.deduplicate_stages import deduplicate_stages
from plait.core_ir.passes.pipeline import CLEANING, GraphPass, build_program, clean
from plait.core_ir.text import print_graph
from plait.core_ir.verify import verify

UNIQUE = list(dict.fromkeys(CLEANING))


@pytest.mark.parametrize("one", UNIQUE, ids=lambda one: one.__name__)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, frozen=FROZEN)
def test_a_pass_keeps_what_a_graph_means(
    one: GraphPass, steps: list[Step], frozen: set[int]
) -> None:
    graph = build(steps, frozen).graph
    check_same(graph, verify(one(graph)))


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, frozen=FROZEN)
def test_cleaning_is_done_in_one_go(steps: list[Step], frozen: set[int]) -> None:
    graph = build(steps, frozen).graph
    cleaned = clean(graph)
    check_same(graph, cleaned)
    assert len(cleaned.eqns) <= len(graph.eqns)
    assert print_graph(clean(cleaned)) == print_graph(cleaned)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, frozen=FROZEN)
def test_the_whole_pipeline(steps: list[Step], frozen: set[int]) -> None:
    joint = build(steps, frozen)
    program = build_program(joint.graph, joint.num_stages)
    inputs = random_inputs(joint.graph)
    expected = run_joint(joint.graph, inputs)
    for kinds in (("F", "B"), ("F", "I", "W")):
        tasks = [stage.tasks[kind] for stage in program.stages for kind in kinds]  # type: ignore[index]
        assert sum(map(num_collectives, tasks)) == num_collectives(joint.graph)
    for again in (program, deduplicate_stages(program)):
        for backward in (("B",), ("I", "W")):
            found = run_program(again, inputs, backward)
            assert found.keys() == expected.keys()
            for port, array in expected.items():
                np.testing.assert_array_equal(found[port], array, err_msg=str(port))


def num_collectives(graph: Graph) -> int:
    return sum(eqn.op is all_reduce for eqn in graph.eqns)


def check_same(before: Graph, after: Graph) -> None:
    """Equal results by port."""
    inputs = random_inputs(before)
    expected, found = run_joint(before, inputs), run_joint(after, inputs)
    assert found.keys() == expected.keys()
    for port, array in expected.items():
        np.testing.assert_array_equal(found[port], array, err_msg=str(port))
