"""From the options of a comparison, lists of names, to jobs. Every name is checked before a process starts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from plait.compare.job import Job, stages_of
from plait.core_ir.errors import UsageError
from plait.core_ir.mesh import Mesh
from plait.core_ir.schedule import registry
from plait.extras import installed
from plait.mesh import read_mesh
from plait.options import CODEGENS, ENGINES
from plait.workloads.family import find_family
from plait.workloads.workload import DTYPES, FRONTENDS, is_named


@dataclass(frozen=True)
class Request:
    """The options of `compare` and `train`. An empty list: what is installed, or the default.

    axes: of the mesh beside that of the stages, with their sizes. Several numbers of microbatches cut one batch in so
    many ways: a sweep over the microbatch size. shard: the axis over which parameters are sharded.
    changes: other values for fields of a named model's config.
    """

    model: str
    config: str = "tiny"
    frontends: Sequence[str] = ()
    backends: Sequence[str] = ()
    engines: Sequence[str] = ()
    schedules: Sequence[str] = ("1f1b",)
    num_ranks: int = 2
    axes: Mapping[str, int] = field(default_factory=dict)
    shard: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    microbatches: Sequence[int] = (8,)
    split: Sequence[str] = ()
    dtype: str = "f32"
    batch_size: int | None = None
    steps: int = 10
    train_steps: int = 0
    codegen: str | None = None
    device: str | None = None
    timeline: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh: stages first, so that other axes stay inside a node; empty where there are no others."""
        return {"stage": self.num_ranks, **self.axes} if self.axes else {}


def plan_jobs(request: Request) -> list[Job]:
    """A job for each engine and number of microbatches, in the order of backends.

    An engine goes with its own backend. A backend of which no engine is named runs its default: torch `distributed` on
    two ranks or more, else `local`; jax `mpmd`. The first engine of each backend does the training, with the frontend
    of the backend's own framework where that is among the frontends.

    Raises `UsageError` or `ScheduleError` for what does not fit.
    """
    _check(request)
    frontends = _frontends(request)
    jobs = []
    for backend in _backends(request):
        own = [name for name in frontends if name is not None and FRONTENDS[name] == backend]
        engines = _engines(request, backend)
        for position, (engine, count) in enumerate(product(engines, request.microbatches)):
            jobs.append(
                Job(
                    model=request.model,
                    config=request.config,
                    dtype=request.dtype,
                    batch_size=_rows(request),
                    split=tuple(request.split) or None,
                    backend=backend,
                    engine=engine,
                    codegen=request.codegen if CODEGENS[backend] else None,
                    device=request.device,
                    num_ranks=request.num_ranks,
                    axes=dict(request.axes),
                    changes=dict(request.changes),
                    num_microbatches=count,
                    frontends=tuple(frontends),
                    schedules=tuple(request.schedules),
                    steps=request.steps,
                    train_steps=request.train_steps if position == 0 else 0,
                    train_frontend=[*own, *frontends][0],
                    timeline=request.timeline,
                )
            )
    return jobs


def mesh_of(request: Request) -> Mesh | None:
    """The mesh of a request, if it has one."""
    return read_mesh(request.mesh, "stage", None) if request.mesh else None


def _rows(request: Request) -> int:
    """Rows of a batch: by default two for every rank that may have rows of its own."""
    parts = math.prod(request.axes.values())
    return request.batch_size or 2 * parts * max(request.microbatches)


def _check(request: Request) -> None:
    if is_named(request.model):
        family = find_family(request.model)
        family.check_mesh(family.config(request.config, request.changes), request.axes)
    known = {
        "frontend": (request.frontends, tuple(FRONTENDS)),
        "backend": (request.backends, tuple(ENGINES)),
        "engine": (request.engines, tuple(e for engines in ENGINES.values() for e in engines)),
        "codegen": ([request.codegen] if request.codegen else [], CODEGENS["torch"]),
        "dtype": ([request.dtype], DTYPES),
    }
    for option, (names, there_are) in known.items():
        for name in names:
            if name not in there_are:
                raise UsageError(f"unknown {option} {name!r}; there are: {', '.join(there_are)}")
    if not request.microbatches:
        raise UsageError("name at least one number of microbatches")
    rows = _rows(request)
    numbers = [
        ("ranks", request.num_ranks),
        *(("microbatches", count) for count in request.microbatches),
        ("batch-size", rows),
    ]
    for option, number in numbers:
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}")
    for count in request.microbatches:
        if rows % count:
            raise UsageError(
                f"a batch of {rows} rows cannot be cut into {count} equal microbatches; --batch-size sets its rows"
            )
    backends = _backends(request)
    for engine in request.engines:
        if not any(engine in ENGINES[backend] for backend in backends):
            raise UsageError(
                f"engine {engine!r} belongs to none of the backends asked for ({', '.join(backends)})"
            )
    if request.timeline and "spmd" in request.engines:
        raise UsageError(
            "the engine spmd runs a step as one program, whose actions cannot be timed for --timeline; leave it out of "
            "--engine"
        )
    if not request.schedules:
        raise UsageError("name at least one schedule")
    for schedule in request.schedules:
        if not schedule.endswith(".csv"):
            for count in request.microbatches:
                registry.build(schedule, request.num_ranks, count)
        stages_of(schedule, request.num_ranks)


def _frontends(request: Request) -> list[str | None]:
    if request.frontends:
        return list(request.frontends)
    if not is_named(request.model):
        return [None]
    return [name for name, framework in FRONTENDS.items() if installed(framework)] or ["torch"]


def _backends(request: Request) -> list[str]:
    if request.backends:
        return list(request.backends)
    if request.engines:
        return [b for b in ENGINES if set(ENGINES[b]) & set(request.engines)]
    return [name for name in FRONTENDS.values() if installed(name)] or ["torch"]


def _engines(request: Request, backend: str) -> list[str]:
    own = [name for name in request.engines if name in ENGINES[backend]]
    if own:
        return own
    num_devices = request.num_ranks * math.prod(request.axes.values())
    distributed = backend == "torch" and num_devices > 1
    return ["distributed" if distributed else ENGINES[backend][0]]
