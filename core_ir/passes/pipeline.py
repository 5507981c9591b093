"""The passes in the order in which they run, and the runner: verified at every border, logged, dumped on request.

A joint graph is cleaned, cut into stages, its backwards are split, and equal tasks are made one; once a schedule is
chosen, what it overlaps becomes one task.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from plait.core_ir.cost import seconds_on
from plait.core_ir.errors import UsageError, VerifyError
from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.hardware import Hardware
from plait.core_ir.lanes import Seconds
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.passes.clean_bodies import clean_bodies
from plait.core_ir.passes.deduplicate_stages import deduplicate_stages
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.fold_constants import fold_constants
from plait.core_ir.passes.fold_exchanges import fold_exchanges
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.passes.merge_common_subexpressions import merge_common_subexpressions
from plait.core_ir.passes.multiplex import multiplex_pairs
from plait.core_ir.passes.overlap import overlap_pairs, overlap_tasks
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.shard_parameters import Sharding, shard_parameters
from plait.core_ir.passes.sort_equations import sort_equations
from plait.core_ir.passes.split_backward import split_backward
from plait.core_ir.program import TASK_KINDS, Program, Stage, TaskKind
from plait.core_ir.text import print_graph, print_program
from plait.core_ir.verify import verify, verify_program

GraphPass: TypeAlias = Callable[[Graph], Graph]
ProgramPass: TypeAlias = Callable[[Program], Program] | Callable[[Program, Seconds], Program]
"""A pass over a program; one that goes by times has to be given `seconds`, see `Passes`."""
ScheduledPass: TypeAlias = (
    Callable[[Program, Collection[tuple[int, int]]], Program]
    | Callable[[Program, Collection[tuple[int, int]], Seconds], Program]
)
"""A pass over a program and the pairs, (forward stage, backward stage), that its schedule overlaps; one that goes by
times has to be given `seconds` too."""

CLEANING: tuple[GraphPass, ...] = (
    eliminate_dead_code,
    clean_bodies,
    fold_constants,
    merge_common_subexpressions,
    fold_exchanges,
    fold_transposes,
    merge_common_subexpressions,
    eliminate_dead_code,
    sort_equations,
)
"""What a joint graph goes through before it is cut."""


def sort_tasks(program: Program) -> Program:
    """The program with the equations of every task in canonical order."""
    stages = [
        Stage(stage.index, {kind: sort_equations(task) for kind, task in stage.tasks.items()})
        for stage in program.stages
    ]
    return replace(program, stages=tuple(stages))


PROGRAM_PASSES: tuple[ProgramPass, ...] = (
    split_backward,
    sort_tasks,
    overlap_tasks,
    deduplicate_stages,
)
"""What a program goes through once it is cut."""

SCHEDULED_PASSES: tuple[ScheduledPass, ...] = (multiplex_pairs, overlap_pairs)
"""What it goes through once its schedule is chosen."""


@dataclass(frozen=True)
class Passes:
    """What a model goes through, in order: graph passes over the joint graph, then `partition_stages`, then program
    passes, then `shard_parameters` where `sharding` says how, then, once the schedule is chosen, scheduled passes. What
    every pass gives is verified.

    Without `split_backward` a backward is one task: a schedule that splits it runs all of it where it has I.

    A pass is a function whose name is its own; `each_task` makes a program pass of a graph pass. A program or scheduled
    pass with an argument named `seconds` that has no default is given it: what an equation takes on the ranks'
    hardware. `partial(overlap_tasks, seconds=...)` goes by other times.
    """

    joint: tuple[GraphPass, ...] = CLEANING
    program: tuple[ProgramPass, ...] = PROGRAM_PASSES
    scheduled: tuple[ScheduledPass, ...] = SCHEDULED_PASSES
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sharding, Sharding | None):
            raise UsageError(f"Passes.sharding must be a Sharding, got {self.sharding!r}")
        for field in fields(self):
            if field.name == "sharding":
                continue
            passes = getattr(self, field.name)
            if callable(passes) or not isinstance(passes, Iterable):
                raise UsageError(
                    f"Passes.{field.name} must be a sequence of functions, got {passes!r}; for one pass write "
                    f"{field.name}=(one,)"
                )
            object.__setattr__(self, field.name, tuple(passes))
            for one in passes:
                if not callable(one):
                    raise UsageError(f"Passes.{field.name} must hold functions, got {one!r}")


DEFAULT_PASSES = Passes()
"""All of Plait's own."""


def each_task(
    one: GraphPass, kinds: Collection[TaskKind] = TASK_KINDS
) -> Callable[[Program], Program]:
    """The pass over every task graph of these kinds of every stage. It has to keep the ports."""

    def run(program: Program) -> Program:
        def changed(kind: TaskKind, task: Graph) -> Graph:
            after = one(task) if kind in kinds else task
            if not isinstance(after, Graph):
                raise VerifyError(f"it must return a Graph, got {type(after).__name__}")
            return after

        stages = [
            Stage(stage.index, {kind: changed(kind, task) for kind, task in stage.tasks.items()})
            for stage in program.stages
        ]
        return replace(program, stages=tuple(stages))

    run.__name__ = _name(one)
    return run


logger = logging.getLogger(__name__)

_Before = TypeVar("_Before", Graph, Program)
_After = TypeVar("_After", Graph, Program)


@dataclass
class Runner:
    """Runs passes: verifies what each gives, logs its name, time and number of new equations, dumps the IR after it."""

    dump: Path | None = None
    num_passes: int = 0

    def run(self, name: str, one: Callable[[_Before], _After], before: _Before) -> _After:
        """What a pass gives, verified."""
        started = time.perf_counter()
        try:
            after = one(before)
            _verified(before, after)
        except VerifyError as error:
            raise VerifyError(f"pass {name} gave what is not valid: {error}") from error
        seconds = time.perf_counter() - started
        num_new = len(_eqns(after) - _eqns(before))
        logger.info("%s: %.3f s, %d equations new", name, seconds, num_new)
        if self.dump is not None:
            self.dump.mkdir(parents=True, exist_ok=True)
            text = print_graph(after) if isinstance(after, Graph) else print_program(after)
            (self.dump / f"{self.num_passes:02d}_{name}.txt").write_text(text)
        self.num_passes += 1
        return after


def clean(
    graph: Graph, passes: Sequence[GraphPass] = CLEANING, runner: Runner | None = None
) -> Graph:
    """The graph after the cleaning passes."""
    runner = runner or Runner()
    for one in passes:
        graph = runner.run(_name(one), one, graph)
    return graph


def build_program(
    graph: Graph,
    num_stages: int,
    *,
    name: str = "",
    passes: Passes = DEFAULT_PASSES,
    mesh: Mesh | None = None,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    hardware: Hardware = CPU_CORE,
    dump: Path | None = None,
) -> Program:
    """The program of a joint graph: stages with tasks F, B, I and W, and those of sharded parameters.

    mesh, layouts: what `passes.sharding` goes by; layouts are those of parameters that axes of the mesh cut.
    hardware: of the ranks, which stand in the mesh; for passes that go by times.
    dump: a folder that gets the text of the IR after each pass. PartitionError where the graph cannot be cut,
    UsageError where parameters cannot be sharded, VerifyError, naming the pass, where one gives what is not valid.
    """
    runner = Runner(dump)
    joint = clean(verify(graph), passes.joint, runner)
    cut = partial(partition_stages, num_stages=num_stages, name=name)
    program: Program = runner.run("partition_stages", cut, joint)
    for one in passes.program:
        program = runner.run(_name(one), _timed(one, hardware, mesh), program)
    if any("I" not in stage.tasks for stage in program.stages):
        program = runner.run("leave_whole", leave_whole, program)
    if passes.sharding is not None:
        axis = passes.sharding.axis
        mesh = _mesh_to_shard_over(axis, mesh)
        others = [
            name
            for name in program.param_types
            if axis not in mesh.summed_axes(name, layouts.get(name, ()))
        ]
        shard = partial(
            shard_parameters, sharding=passes.sharding, size=mesh.axes[axis], whole=others
        )
        program = runner.run("shard_parameters", shard, program)
    return program


def leave_whole(program: Program) -> Program:
    """The program with backwards that no pass has split whole: what stands for I is all of B, for W nothing."""

    def whole(stage: Stage) -> Stage:
        if "B" not in stage.tasks or "I" in stage.tasks:
            return stage
        backward = stage.tasks["B"]
        rest = Graph(f"{backward.name}_rest", (), (), ())
        return Stage(stage.index, {**stage.tasks, "I": backward, "W": rest})

    return replace(program, stages=tuple(map(whole, program.stages)))


def _mesh_to_shard_over(axis: str, mesh: Mesh | None) -> Mesh:
    """The mesh, if gradients are summed over the axis."""
    if mesh is None:
        raise UsageError(f"Sharding({axis!r}) needs a mesh with that axis; pass mesh=")
    summed = {*mesh.data_axes, *chain.from_iterable(mesh.partial_grads.values())}
    if axis not in summed:
        raise UsageError(
            f"Sharding({axis!r}): parameters are sharded over an axis along which microbatches are cut; in the mesh "
            f"{dict(mesh.axes)} these are {', '.join(map(repr, sorted(summed))) or '(none)'}"
        )
    return mesh


def schedule_program(
    program: Program,
    pairs: Collection[tuple[int, int]],
    passes: Passes = DEFAULT_PASSES,
    *,
    hardware: Hardware = CPU_CORE,
    mesh: Mesh | None = None,
) -> Program:
    """The program with what its schedule asks for: `pairs` are those that it overlaps.

    hardware: of the ranks, which stand in the mesh; for passes that go by times.
    """
    runner = Runner()
    for one in passes.scheduled:
        timed = _timed(one, hardware, mesh)
        program = runner.run(_name(one), partial(_call, timed, pairs), program)
    return program


def _call(
    one: Callable[..., Program], pairs: Collection[tuple[int, int]], program: Program
) -> Program:
    return one(program, pairs)


def _timed(
    one: Callable[..., Program], hardware: Hardware, mesh: Mesh | None
) -> Callable[..., Program]:
    """The pass, with what equations take if it has to be given that."""
    asked = signature(one).parameters.get("seconds")
    if asked is None or asked.default is not asked.empty:
        return one
    return partial(one, seconds=seconds_on(hardware, mesh))


def _name(one: Callable[..., object]) -> str:
    if isinstance(one, partial):
        return _name(one.func)
    return str(getattr(one, "__name__", one))


def _verified(before: Graph | Program, after: object) -> None:
    wanted = Program if isinstance(before, Program) else (Graph, Program)
    if not isinstance(after, wanted):
        what = "Program" if isinstance(before, Program) else "Graph"
        raise VerifyError(f"it must return a {what}, got {type(after).__name__}")
    if isinstance(after, Graph):
        verify(after)
    elif isinstance(after, Program):
        verify_program(after)


def _eqns(ir: Graph | Program) -> set[Eqn]:
    if isinstance(ir, Graph):
        return set(ir.eqns)
    return {eqn for stage in ir.stages for task in stage.tasks.values() for eqn in task.eqns}
