"""The passes in the order in which they run, and the runner: verified at every border, logged, dumped on request.

A joint graph is cleaned, cut into stages, its backwards are split, and equal tasks are made one.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.passes.clean_bodies import clean_bodies
from plait.core_ir.passes.deduplicate_stages import deduplicate_stages
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.fold_constants import fold_constants
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.passes.merge_common_subexpressions import merge_common_subexpressions
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.sort_equations import sort_equations
from plait.core_ir.passes.split_backward import split_backward
from plait.core_ir.program import Program, Stage
from plait.core_ir.text import print_graph, print_program
from plait.core_ir.verify import verify, verify_program

GraphPass: TypeAlias = Callable[[Graph], Graph]
ProgramPass: TypeAlias = Callable[[Program], Program]

CLEANING: tuple[GraphPass, ...] = (
    eliminate_dead_code,
    clean_bodies,
    fold_constants,
    merge_common_subexpressions,
    fold_transposes,
    merge_common_subexpressions,
    eliminate_dead_code,
    sort_equations,
)
"""What a joint graph goes through before it is cut."""

TASK_PASSES: tuple[GraphPass, ...] = (sort_equations,)
"""What every task goes through once its backward is split."""


def clean_tasks(program: Program) -> Program:
    """The program with every task taken through TASK_PASSES."""
    stages = []
    for stage in program.stages:
        tasks = dict(stage.tasks)
        for kind, task in stage.tasks.items():
            for one in TASK_PASSES:
                tasks[kind] = task = one(task)
        stages.append(Stage(stage.index, tasks))
    return replace(program, stages=tuple(stages))


PROGRAM_PASSES: tuple[ProgramPass, ...] = (split_backward, clean_tasks, deduplicate_stages)
"""What a program goes through once it is cut."""

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """One run over the passes: logs name, time and the number of equations made anew; dumps the IR after each."""

    dump: Path | None = None
    num_passes: int = 0

    def graph(self, name: str, before: Graph | None, make: Callable[[], Graph]) -> Graph:
        """The result of a pass on a graph, verified."""
        started = time.perf_counter()
        graph = verify(make())
        old = set(before.eqns) if before else set()
        self._record(name, started, _num_new(graph, old), print_graph, graph)
        return graph

    def program(self, name: str, before: set[Eqn], make: Callable[[], Program]) -> Program:
        """The result of a pass on a program, verified."""
        started = time.perf_counter()
        program = verify_program(make())
        num_new = sum(_num_new(task, before) for task in _tasks(program))
        self._record(name, started, num_new, print_program, program)
        return program

    def _record(
        self, name: str, started: float, num_new: int, text: Callable[..., str], ir: object
    ) -> None:
        logger.info("%s: %.3f s, %d equations new", name, time.perf_counter() - started, num_new)
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            (self.dump / f"{self.num_passes:02d}_{name}.txt").write_text(text(ir))
        self.num_passes += 1


def clean(graph: Graph, passes: Sequence[GraphPass] = CLEANING, run: Run | None = None) -> Graph:
    """The graph after the cleaning passes."""
    run = run or Run()
    for one in passes:
        graph = run.graph(one.__name__, graph, lambda one=one, graph=graph: one(graph))  # type: ignore[misc]
    return graph


def build_program(
    graph: Graph, num_stages: int, *, name: str = "", dump: Path | None = None
) -> Program:
    """The program of a joint graph: stages with tasks F, B, I and W.

    dump: a folder that gets the text of the IR after each pass. PartitionError where the graph cannot be cut.
    """
    run = Run(dump)
    joint = clean(verify(graph), run=run)
    program = run.program(
        "partition_stages", set(joint.eqns), lambda: partition_stages(joint, num_stages, name=name)
    )
    for one in PROGRAM_PASSES:
        before = {eqn for task in _tasks(program) for eqn in task.eqns}
        program = run.program(one.__name__, before, lambda one=one, program=program: one(program))  # type: ignore[misc]
    return program


def _tasks(program: Program) -> list[Graph]:
    return [task for stage in program.stages for task in stage.tasks.values()]


def _num_new(graph: Graph, before: set[Eqn]) -> int:
    return sum(eqn not in before for eqn in graph.eqns)
