"""The pipeline: what it does to a whole program, in which time, and what it tells."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from joint_programs import random_inputs, run_joint, run_program
from layered import layered
from test_split_backward import gated_mlp

from plait.core_ir.errors import UsageError, VerifyError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.parse import parse_program
from plait.core_ir.passes.deduplicate_stages import deduplicate_stages
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.pipeline import (
    CLEANING,
    PROGRAM_PASSES,
    Passes,
    build_program,
    clean,
    each_task,
)
from plait.core_ir.text import print_program


def test_a_layered_program_gives_what_the_joint_program_gives() -> None:
    graph = layered(6, 3)
    program = build_program(graph, 3)
    inputs = random_inputs(graph)
    expected = run_joint(graph, inputs)
    for backward in (("B",), ("I", "W")):
        found = run_program(program, inputs, backward)
        assert found.keys() == expected.keys()
        for port, array in expected.items():
            np.testing.assert_allclose(found[port], array, rtol=1e-10, err_msg=str(port))


def test_equal_stages_share_their_equations() -> None:
    program = build_program(layered(8, 4), 4)
    for kind in ("F", "B", "I", "W"):
        middle, other = program.task(1, kind), program.task(2, kind)
        assert middle.eqns is other.eqns
        assert middle.inputs is other.inputs
        assert program.task(0, kind).eqns is not middle.eqns
    assert program.stages[1].params != program.stages[2].params


def test_stages_that_differ_in_an_attribute_share_nothing() -> None:
    program = partition_stages(gated_mlp(3), 3)
    again = deduplicate_stages(program)
    tasks = [stage.tasks["F"] for stage in again.stages]
    assert tasks[0].eqns is not tasks[1].eqns  # the batch is no activation
    assert tasks[1].eqns is not tasks[2].eqns  # the last has the loss


def test_the_text_of_a_program_parses_back() -> None:
    text = print_program(build_program(layered(4, 2), 2))
    without_notes = "\n".join(line for line in text.split("\n") if not line.startswith("//"))
    assert print_program(parse_program(text)) == without_notes


def test_each_pass_is_logged_and_dumped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "plait.core_ir.passes.pipeline"):
        build_program(layered(2, 2), 2, dump=tmp_path)
    names = [
        *(one.__name__ for one in CLEANING),
        "partition_stages",
        *(one.__name__ for one in PROGRAM_PASSES),
    ]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == names
    assert all("equations new" in record.getMessage() for record in caplog.records)
    dumped = sorted(path.name for path in tmp_path.iterdir())
    assert dumped == [f"{number:02d}_{name}.txt" for number, name in enumerate(names)]
    assert all(path.read_text().startswith("plait.ir 1") for path in tmp_path.iterdir())


def test_a_pass_that_breaks_a_graph_is_found_at_its_border() -> None:
    graph = layered(1, 1)

    def break_it(graph: Graph) -> Graph:
        return Graph(graph.name, graph.inputs, graph.eqns, (Value(graph.outputs[0].type),))

    with pytest.raises(VerifyError, match="not defined"):
        clean(graph, (break_it,))


def test_work_grows_linearly_with_layers() -> None:
    small, middle, large = (
        _calls(partial(build_program, layered(num_layers, 4), 4)) for num_layers in (4, 8, 16)
    )
    assert large - middle == pytest.approx(2 * (middle - small), rel=0.05)


def _calls(run: Callable[[], object]) -> int:
    """How many Python functions a run calls: its work, whatever else the machine does."""
    count = 0

    def count_call(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def forgets(graph: Graph) -> Graph:
    del graph
    return None  # type: ignore[return-value]


def test_a_graph_pass_that_gives_nothing_is_named() -> None:
    passes = Passes(program=(*PROGRAM_PASSES, each_task(forgets)))
    with pytest.raises(VerifyError, match=r"pass forgets .*it must return a Graph, got NoneType"):
        build_program(layered(2, 2), 2, passes=passes)


def test_passes_are_sequences() -> None:
    with pytest.raises(UsageError, match=r"Passes\.program must be a sequence.*program=\(one,\)"):
        Passes(program=each_task(forgets))  # type: ignore[arg-type]
