"""From the options of a comparison, lists of names, to jobs. Every option is checked before a process starts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from plait.compare.fitting import misfit
from plait.compare.job import Job, stages_of
from plait.compare.machine import check_device
from plait.core_ir.errors import PlaitError, UsageError
from plait.core_ir.mesh import Mesh
from plait.extras import installed
from plait.mesh import read_mesh
from plait.options import CODEGENS, ENGINES
from plait.workloads.family import find_family
from plait.workloads.imported import check_path
from plait.workloads.splits import check_layers, layers_of
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
    of the backend's own framework where that is among the frontends. A schedule that cannot have a number of
    microbatches is left out there: `left_out` says why.

    Raises `UsageError` or `ScheduleError` for what does not fit, and where no schedule fits at all.
    """
    _check(request)
    frontends = _frontends(request)
    fitting = _fitting(request)
    jobs = []
    for backend in _backends(request):
        own = [name for name in frontends if name is not None and FRONTENDS[name] == backend]
        engines = _engines(request, backend)
        for position, (engine, count) in enumerate(product(engines, fitting)):
            jobs.append(
                Job(
                    model=request.model,
                    config=request.config,
                    dtype=request.dtype,
                    batch_size=rows_of(request),
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
                    schedules=fitting[count],
                    steps=request.steps,
                    train_steps=request.train_steps if position == 0 else 0,
                    train_frontend=[*own, *frontends][0],
                    timeline=request.timeline,
                )
            )
    return jobs


def left_out(request: Request) -> list[str]:
    """A line for each schedule and number of microbatches that `plan_jobs` leaves out."""
    return [
        f"{schedule} with {count} microbatches is left out: {misfit}"
        for (schedule, count), misfit in _misfits(request).items()
    ]


def _fitting(request: Request) -> dict[int, tuple[str, ...]]:
    """The schedules that can be had, by number of microbatches."""
    misfits = _misfits(request)
    fitting = {
        count: tuple(s for s in request.schedules if (s, count) not in misfits)
        for count in request.microbatches
    }
    if not any(fitting.values()):
        raise next(iter(misfits.values()))
    return {count: schedules for count, schedules in fitting.items() if schedules}


def _misfits(request: Request) -> dict[tuple[str, int], PlaitError]:
    num_layers = num_cuts = None
    if is_named(request.model):
        config = find_family(request.model).config(request.config, request.changes)
        num_layers = None if request.split else config.num_layers
        num_cuts = len(request.split) or None
    found = {
        (s, count): misfit(s, request.num_ranks, count, num_cuts=num_cuts, num_layers=num_layers)
        for count in request.microbatches
        for s in request.schedules
    }
    return {case: error for case, error in found.items() if error is not None}


def mesh_of(request: Request) -> Mesh | None:
    """The mesh of a request, if it has one."""
    return read_mesh(request.mesh, "stage", None) if request.mesh else None


def rows_of(request: Request) -> int:
    """Rows of a batch: by default two for every rank that may have rows of its own."""
    parts = math.prod(request.axes.values())
    return request.batch_size or 2 * parts * max(request.microbatches)


def _check(request: Request) -> None:
    if request.shard is not None and request.shard not in request.axes:
        raise UsageError(
            f"--shard {request.shard} names no axis of --mesh; write --mesh {request.shard}=SIZE too"
        )
    for path in request.split:
        if request.split.count(path) > 1:
            raise UsageError(
                f"--split names {path} twice; name each module path to cut before once"
            )
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
    _check_model(request)
    if not request.microbatches:
        raise UsageError("name at least one number of microbatches")
    rows = rows_of(request)
    numbers = [
        ("ranks", request.num_ranks),
        *(("microbatches", count) for count in request.microbatches),
        ("batch-size", rows),
    ]
    for option, number in numbers:
        if number < 1:
            raise UsageError(f"{option} must be at least 1, got {number}")
    for count in request.microbatches if is_named(request.model) else ():
        _check_rows(request, count)
    backends = _backends(request)
    check_device(request.device, backends)
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
        stages_of(schedule, request.num_ranks)


def _check_model(request: Request) -> None:
    if not is_named(request.model):
        for option, value in (("set", request.changes), ("batch-size", request.batch_size)):
            if value:
                raise UsageError(
                    f"--{option} is for named models; {request.model} says itself what it builds: change it there"
                )
        check_path(request.model)
        return
    family = find_family(request.model)
    config = family.config(request.config, request.changes)
    family.check_mesh(config, request.axes)
    check_layers(request.split, config)
    if request.split and "flax" in _frontends(request):
        layers_of(request.split, config)
    if request.shard in family.whole_axes:
        raise UsageError(
            f"--shard {request.shard}: {family.name} itself is cut over that axis, along which every rank has the "
            "whole batch; parameters are sharded over an axis along which the batch is cut: --mesh data=2 --shard data"
        )


def _check_rows(request: Request, count: int) -> None:
    """UsageError where microbatches, and their parts over axes of the mesh, would not be equal."""
    rows, whole_axes = rows_of(request), find_family(request.model).whole_axes
    parts = {axis: size for axis, size in request.axes.items() if axis not in whole_axes}
    if rows % (count * math.prod(parts.values())):
        num_parts = math.prod(parts.values())
        cut = f", each of {num_parts} parts over {', '.join(parts)}" if parts else ""
        raise UsageError(
            f"a batch of {rows} rows cannot be cut into {count} equal microbatches{cut}; choose a --batch-size that "
            f"{count * num_parts} divides, or another number of --microbatches{', or another --mesh' if parts else ''}"
        )


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
