"""What a comparison may ask of the machine it runs on, told before a process starts."""

import os
import re
from collections.abc import Sequence

from plait.compare.job import Job
from plait.core_ir.errors import UsageError

RANKS_PER_CORE = 16
LEAST_RANKS = 64
"""So many ranks run anywhere, if slowly."""

DEVICES = {"torch": r"cpu|cuda(:\d+)?", "jax": r"cpu|gpu|cuda"}
"""What a backend may be told to run on."""


def check_ranks(jobs: Sequence[Job]) -> None:
    """UsageError where a job has more ranks than a machine with so many cores should be given.

    A rank is a process of its own, or at least a thread or a device of XLA, whatever its engine.
    """
    cores = os.cpu_count() or 1
    most = max(LEAST_RANKS, RANKS_PER_CORE * cores)
    for job in jobs:
        if job.num_devices > most:
            sizes = " x ".join(
                f"{axis} {size}" for axis, size in (job.mesh or {"stage": job.num_ranks}).items()
            )
            raise UsageError(
                f"{job.name} would run {job.num_devices} ranks ({sizes}) on this machine, whose {cores} cores are "
                f"given at most {most}; make --ranks or the axes of --mesh smaller, or --simulate, which runs nothing"
            )


def check_gpus(job: Job, num_gpus: int) -> None:
    """UsageError where processes of a job would share a GPU: NCCL takes one rank on each."""
    if job.num_processes > num_gpus:
        raise UsageError(
            f"{job.num_processes} ranks need a GPU each, and this machine has {num_gpus}; make --ranks or the axes of "
            "--mesh smaller, or choose --engine local or --device cpu"
        )


def check_device(device: str | None, backends: Sequence[str]) -> None:
    """UsageError for a device that one of the backends does not have."""
    for backend in backends if device is not None else ():
        if not re.fullmatch(DEVICES[backend], device or ""):
            known = ", ".join(name.replace(r"(:\d+)?", "") for name in DEVICES[backend].split("|"))
            raise UsageError(
                f"--device {device}: the backend {backend} runs on {known}; choose one of these, or leave the backend "
                "out with --backend"
            )
