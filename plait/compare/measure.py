"""Measuring one row: a workload through one engine under one schedule, against its framework unpipelined."""

import gc
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np

import plait
from plait.compare.describe import description, versions
from plait.compare.job import Job, stages_of
from plait.compare.timelines import encode
from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import ScheduleError, UsageError
from plait.core_ir.numerics import Purpose, gradient_errors, relative_error, tolerance
from plait.extras import load
from plait.frontends.reference import Reference
from plait.pipeline import Pipeline, step_keys
from plait.workloads.workload import Workload, is_named, num_tokens


class Host(Protocol):
    """What measuring asks of the framework that runs the pipeline."""

    device: str

    @property
    def versions(self) -> tuple[str, ...]:
        """The packages whose versions belong to a row."""

    def wait(self, results: Any) -> None:
        """Until the results are there, on every rank."""

    def reset_peak(self) -> None:
        """Count peak memory anew."""

    def peak_bytes(self) -> int:
        """The most memory since `reset_peak`."""


def compile_workload(job: Job, workload: Workload, schedule: str) -> Pipeline:
    """The workload compiled for the job's engine."""
    try:
        return plait.compile(
            workload.loss_fn,
            workload.model,
            workload.batch,
            split=workload.split,
            schedule=schedule,
            num_microbatches=job.num_microbatches,
            num_ranks=job.num_ranks,
            mesh=job.mesh,
            backend=job.backend,
            engine=job.engine,
            codegen=job.codegen,
            device=job.device,
        )
    except ScheduleError as error:
        if is_named(job.model):
            raise
        stages = stages_of(schedule, job.num_ranks)
        raise ScheduleError(
            f"{error}. {schedule} on {job.num_ranks} ranks runs {stages} stages: name {stages - 1} module paths to cut "
            f"before with --split, or call plait.stage_boundary {stages - 1} times in the model, or change --ranks"
        ) from error


def measure(
    job: Job,
    workload: Workload,
    schedule: str,
    host: Host,
    reference: Callable[[], Reference],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """What this rank can say of a row; `max_grad_error` is over the parameters named in `checked`.

    Tasks are profiled for the simulation (and for the order, under `auto`), then steps are timed after a first one that
    is not, then memory is read, and `reference` is called last.
    """
    progress("compiling")
    gc.collect()
    started = time.perf_counter()
    pipeline = compile_workload(job, workload, schedule)
    compile_seconds = time.perf_counter() - started
    progress("stepping")
    params = _whole_params(job, workload)
    pipeline.profile(workload.batch, params)
    loss, grads = pipeline.loss_and_grads(workload.batch, params, step=0)
    grads = _side(workload).named_gradients(grads)
    seconds, peak = _timed_steps(job, workload, pipeline, host, params)
    simulated = pipeline.simulate()
    timeline = encode(pipeline.measure(workload.batch, params), simulated) if job.timeline else None
    progress("checking against the unpipelined framework")
    expected = reference()
    row = description(job, workload, pipeline, schedule)
    purpose: Purpose = "framework" if workload.framework == job.backend else "backends"
    allowed = tolerance(row["dtype"], purpose)
    errors = gradient_errors(grads, expected.grads, partial=True)
    loss_error = relative_error(to_numpy(loss), expected.loss)
    median = float(np.median(seconds))
    return {
        **row,
        "batch_size": job.batch_size if is_named(job.model) else None,
        "device": host.device,
        "versions": versions(*host.versions),
        "loss": float(to_numpy(loss)),
        "reference_loss": float(expected.loss),
        "loss_error": loss_error,
        "max_grad_error": max(errors.values(), default=0.0),
        "finite": all(np.isfinite(to_numpy(x)).all() for x in (loss, *grads.values())),
        "tolerance": {"loss": allowed.loss, "grads": allowed.grads},
        "step_seconds": {"median": median, "spread": _spread(seconds), "steps": len(seconds)},
        "tokens_per_second": num_tokens(workload.batch) / median,
        "peak_memory_bytes": peak,
        "simulated_step_seconds": simulated.makespan,
        "bubble_rate": simulated.bubble_rate,
        "compile_seconds": compile_seconds,
        "checked": sorted(grads),
        "expected": sorted(expected.grads),
        "timeline": timeline,
    }


def compute_reference(job: Job, workload: Workload) -> Reference:
    """The unpipelined framework on the same microbatches, with the random keys of step 0."""
    module = _side(workload)
    reference: Reference = module.reference(
        *(workload.plain or (workload.loss_fn, workload.model)),
        workload.batch,
        num_microbatches=job.num_microbatches,
        keys=step_keys(0, 0, job.num_microbatches),
    )
    return reference


def merge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of what all ranks said: the largest errors and memory, the rest as rank 0 says.

    It is within tolerance only if all numbers are finite: NaN agrees with NaN, but says nothing.

    Raises UsageError where no rank checked some gradient.
    """
    unchecked = set(rows[0]["expected"]) - {name for row in rows for name in row["checked"]}
    if unchecked:
        raise UsageError(f"no rank gave the gradients {sorted(unchecked)}")
    largest = ("loss_error", "max_grad_error", "peak_memory_bytes", "compile_seconds")
    merged = {**rows[0], **{key: max(row[key] for row in rows) for key in largest}}
    merged["finite"] = all(row["finite"] for row in rows)
    allowed = merged["tolerance"]
    merged["within_tolerance"] = (
        merged["finite"]
        and merged["loss_error"] <= allowed["loss"]
        and merged["max_grad_error"] <= allowed["grads"]
    )
    return {key: value for key, value in merged.items() if key not in _UNMERGED}


_UNMERGED = ("checked", "expected", "timeline")


def _side(workload: Workload) -> ModuleType:
    """The reference module of the workload's framework."""
    return load(workload.framework, f"frontends.{workload.framework}.reference")


def _whole_params(job: Job, workload: Workload) -> Any:
    """The parameters of a torch model over a mesh all of whose ranks run in this process; None: its own will do."""
    if workload.plain is None or workload.framework != "torch" or job.engine == "distributed":
        return None
    _, model = workload.plain
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _timed_steps(
    job: Job, workload: Workload, pipeline: Pipeline, host: Host, params: Any
) -> tuple[list[float], int]:
    """Seconds of each step, from all ranks ready to all ranks done, and the peak of memory."""
    host.wait(pipeline.loss_and_grads(workload.batch, params, step=0))
    host.reset_peak()
    seconds: list[float] = []
    for _ in range(job.steps):
        started = time.perf_counter()
        host.wait(pipeline.loss_and_grads(workload.batch, params, step=0))
        seconds.append(time.perf_counter() - started)
    return seconds, host.peak_bytes()


def _spread(seconds: list[float]) -> float:
    """The range of the middle half."""
    low, high = np.percentile(seconds, [25, 75])
    return float(high - low)
