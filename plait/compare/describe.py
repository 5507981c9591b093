"""The part of a row that says what was run."""

from importlib.metadata import version
from typing import Any

from plait.compare.job import Job
from plait.pipeline import Pipeline
from plait.workloads.workload import Workload, is_named


def description(job: Job, workload: Workload, pipeline: Pipeline, schedule: str) -> dict[str, Any]:
    """Model, frontend, backend, engine, schedule, sizes and dtype; the dtype is that of the first parameter."""
    params = [leaf for leaf in pipeline.captured.leaves if leaf.role == "param"]
    return {
        "model": job.model,
        "config": job.config if is_named(job.model) else None,
        "frontend": workload.frontend,
        "backend": job.backend,
        "engine": job.engine,
        "codegen": pipeline.options.codegen,
        "schedule": schedule,
        "ranks": pipeline.schedule.num_ranks,
        "mesh": job.mesh,
        "stages": pipeline.program.num_stages,
        "microbatches": job.num_microbatches,
        "dtype": next(leaf.type.dtype.name for leaf in params if leaf.trainable),
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Plait and of packages that are installed."""
    return {name: version(name) for name in ("plait", *packages)}
