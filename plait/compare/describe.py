"""The part of a row that says what was run."""

from importlib.metadata import version
from typing import Any

from plait.compare.job import Job
from plait.core_ir.mesh import Mesh
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
        "axis_roles": roles_of(pipeline.options.mesh),
        "stages": pipeline.program.num_stages,
        "microbatches": job.num_microbatches,
        "dtype": next(leaf.type.dtype.name for leaf in params if leaf.trainable),
    }


def roles_of(mesh: Mesh | None) -> dict[str, str]:
    """What each axis of a mesh beside that of the stages is for, as the capture of a model found it."""
    if mesh is None:
        return {}
    roles = {
        "data parallel": mesh.data_axes,
        "the model's own": mesh.named_axes,
        "left to XLA": mesh.auto_axes,
    }
    return {
        axis: ", ".join(role for role, axes in roles.items() if axis in axes) or "all the same"
        for axis in mesh.other_axes
    }


def versions(*packages: str) -> dict[str, str]:
    """Versions of Plait and of packages that are installed."""
    return {name: version(name) for name in ("plait", *packages)}
