"""Comparing schedules without running anything: a model captured without weights, simulated on described hardware."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from plait.api import schedule_for
from plait.capturing import capture_model, program_of
from plait.compare.describe import roles_of
from plait.compare.job import stages_of
from plait.compare.plan import Request, mesh_of, plan_jobs, rows_of
from plait.compare.steps import overlapped, step_by_step
from plait.core_ir.cost import peak_seconds
from plait.core_ir.errors import ScheduleError, UsageError
from plait.core_ir.hardware import Hardware, to_json
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.passes.equations import collective_axes
from plait.core_ir.passes.overlap import overlap_tasks
from plait.core_ir.passes.pipeline import PROGRAM_PASSES, Passes
from plait.core_ir.passes.shard_parameters import Sharding
from plait.core_ir.program import STEP_KINDS, Program
from plait.core_ir.schedule.auto import AUTO
from plait.core_ir.schedule.estimate import estimate, simulate_program
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.timeline import Timeline
from plait.workloads.abstract import load_abstract
from plait.workloads.family import find_family
from plait.workloads.workload import Sizes, is_named, num_tokens

Progress = Callable[[str, int, int], None]
"""Called with what is done next, and how much of how much is done."""


@dataclass(frozen=True)
class Cut:
    """A model cut into stages: its program, what the axes of the mesh are for, and the positions of text in a batch."""

    frontend: str
    program: Program
    axis_roles: dict[str, str]
    num_tokens: int


def simulate_rows(
    request: Request, hardware: Hardware, progress: Progress
) -> Iterator[tuple[dict[str, Any], Timeline]]:
    """A row, with its timeline, for each number of microbatches, frontend and schedule.

    The frontend is the first that is installed, unless some are asked for. Raises `UsageError` or `ScheduleError` for
    what does not fit, and for options of a run, which this is none.
    """
    _refuse_options_of_a_run(request)
    cases = _cases(request)
    cut = cache(lambda frontend, stages, count: _cut(request, frontend, stages, count))
    for done, (frontend, schedule, count) in enumerate(cases):
        progress(f"{schedule} with {count} microbatches", done, len(cases))
        stages = stages_of(schedule, request.num_ranks)
        yield _row(request, hardware, schedule, count, cut(frontend, stages, count))


def with_experts(request: Request, hardware: Hardware) -> Request:
    """The request of a model with experts as they are run: over the ranks of a node, equally loaded, with everything
    else sharded over the same ranks; whatever of it is asked for stays."""
    if not is_named(request.model) or request.axes:
        return request
    config = find_family(request.model).config(request.config, request.changes)
    num_experts, size = getattr(config, "num_experts", 0), hardware.ranks_per_node
    if not num_experts or num_experts % size:
        return request
    return replace(
        request,
        axes={"expert": size},
        shard=request.shard or "expert",
        changes={"capacity_factor": 1.0, **request.changes},
    )


def _refuse_options_of_a_run(request: Request) -> None:
    given = {
        "backend": request.backends,
        "engine": request.engines,
        "codegen": request.codegen,
        "device": request.device,
        "train": request.train_steps,
    }
    for option, value in given.items():
        if value:
            raise UsageError(f"--simulate runs nothing, so --{option} has no meaning with it")


def _cases(request: Request) -> list[tuple[str | None, str, int]]:
    jobs = plan_jobs(request)
    own = [job for job in jobs if (job.backend, job.engine) == (jobs[0].backend, jobs[0].engine)]
    return [
        (frontend, schedule, job.num_microbatches)
        for job in own
        for frontend in (job.frontends if request.frontends else job.frontends[:1])
        for schedule in job.schedules
    ]


def _cut(request: Request, frontend: str | None, num_stages: int, num_microbatches: int) -> Cut:
    sizes = Sizes(
        config=request.config,
        dtype=request.dtype,
        batch_size=rows_of(request),
        num_stages=num_stages,
        mesh=request.mesh,
        changes=dict(request.changes),
    )
    workload = load_abstract(request.model, frontend, sizes, tuple(request.split) or None)
    captured, mesh = capture_model(
        workload.loss_fn,
        workload.model,
        workload.batch,
        num_microbatches=num_microbatches,
        split=workload.split,
        mesh=mesh_of(request),
    )
    passes = Passes(
        program=tuple(one for one in PROGRAM_PASSES if one is not overlap_tasks),
        sharding=Sharding(request.shard) if request.shard else None,
    )
    program = program_of(captured, passes, CPU_CORE, mesh)
    return Cut(workload.frontend, program, roles_of(mesh), num_tokens(workload.batch))


def _row(
    request: Request, hardware: Hardware, schedule: str, num_microbatches: int, cut: Cut
) -> tuple[dict[str, Any], Timeline]:
    chosen = _schedule(cut.program, schedule, request, num_microbatches, hardware)
    mesh = mesh_of(request)
    program = overlapped(cut.program, chosen, hardware, mesh)
    times, memory = estimate(program, chosen.placement, hardware, mesh)
    timeline = simulate_program(chosen, program, times, memory)
    step, peaks = timeline.makespan, timeline.peak_memory.tolist()
    # A forward's products once, and twice for its backward, whatever is computed again.
    model_seconds = 3 * num_microbatches * _peak_seconds(program, hardware)
    named = is_named(request.model)
    row = {
        "model": request.model,
        "config": request.config if named else None,
        "frontend": cut.frontend,
        "schedule": schedule,
        "ranks": chosen.num_ranks,
        "stages": program.num_stages,
        "microbatches": num_microbatches,
        "batch_size": rows_of(request) if named else None,
        "dtype": request.dtype if named else None,
        "hardware": to_json(hardware),
        "simulated_step_seconds": step,
        "tokens_per_second": cut.num_tokens / step,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "model_flops_utilisation": model_seconds / (chosen.num_ranks * step),
        "peak_memory_bytes": peaks,
        "fits": max(peaks) <= hardware.memory_bytes,
        "mesh": request.mesh,
        "axis_roles": cut.axis_roles,
        "sharded_over": request.shard,
        "changes": dict(request.changes),
        "steps": step_by_step(cut.program, chosen, hardware, mesh, step) if request.axes else None,
        "between_nodes": _leaving(program, hardware, mesh),
    }
    return row, timeline


def _leaving(program: Program, hardware: Hardware, mesh: Mesh | None) -> list[str]:
    """The axes of collectives inside tasks whose ranks are on several nodes."""
    if mesh is None:
        return []
    tasks = [g for s in program.stages for kind, g in s.tasks.items() if kind not in STEP_KINDS]
    named = {axis for graph in tasks for axis in collective_axes(graph)}
    return [axis for axis in mesh.axes_between_nodes(hardware.ranks_per_node) if axis in named]


def _schedule(
    program: Program, name: str, request: Request, num_microbatches: int, hardware: Hardware
) -> Schedule:
    """The schedule; `auto` within the hardware's memory, if anything fits into it."""
    build = partial(
        schedule_for,
        *(program, name, request.num_ranks, num_microbatches),
        hardware=hardware,
        mesh=mesh_of(request),
    )
    if name == AUTO.name:
        with suppress(ScheduleError):
            return build(memory_limit=hardware.memory_bytes)
    return build()


def _peak_seconds(program: Program, hardware: Hardware) -> float:
    return sum(peak_seconds(stage.tasks["F"], hardware) for stage in program.stages)
