"""A comparison from its jobs to its results: rows and trainings."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from plait.compare.job import Job
from plait.compare.launch import run_job
from plait.compare.machine import check_ranks
from plait.compare.measure import merge
from plait.compare.report import Display
from plait.compare.timelines import decode, render_page
from plait.core_ir.errors import ExecutionError, UsageError
from plait.core_ir.schedule.timeline import Timeline


@dataclass
class Results:
    """What `--json` writes: rows by frontend, backend, engine and schedule, and trainings; timelines by title."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[tuple[str, Timeline]] = field(default_factory=list)

    @property
    def are_none(self) -> bool:
        """Whether nothing has run to its end."""
        return not (self.rows or self.training)

    def write_json(self, path: Path) -> None:
        """Write `{"rows": [...], "training": [...]}`; a number that is not finite becomes null."""
        content = _finite({"rows": self.rows, "training": self.training})
        _write(path, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_timelines(self, path: Path) -> None:
        """Write a page with the measured and the simulated timeline of each row, on one scale."""
        _write(path, render_page(self.timelines))

    def check(self) -> None:
        """Raise ExecutionError, naming the rows, where one is out of tolerance."""
        wrong = [
            f"{row['frontend']} on {row['backend']} {row['engine']}, {row['schedule']}: {_fault(row)}"
            for row in self.rows
            if not row["within_tolerance"]
        ]
        if wrong:
            raise ExecutionError(
                "\n  ".join(["these rows do not agree with the unpipelined framework:", *wrong])
            )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _fault(row: dict[str, Any]) -> str:
    if not row["finite"]:
        return (
            f"NaN or infinity in the loss ({row['loss']}) or the gradients, which compares with nothing; the framework "
            f"itself has the loss {row['reference_loss']}"
        )
    return (
        f"loss error {row['loss_error']:.1e} (at most {row['tolerance']['loss']:.0e}), gradient error "
        f"{row['max_grad_error']:.1e} (at most {row['tolerance']['grads']:.0e})"
    )


def check_writable(file: Path | None) -> None:
    """UsageError, before any work, for a file that cannot be written. Its folder is made where there is none."""
    if file is None:
        return
    is_new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def check_page(file: Path | None) -> None:
    """UsageError for a file, a page to look at, whose name says that it is something else."""
    if file is not None and file.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--timeline writes a page; name a file that ends in .html, not {file}")


def run_jobs(jobs: Sequence[Job], display: Display, results: Results, *, timeout: float) -> None:
    """Run one job after another, and add what they give to `results`.

    The error of the first that fails is raised once the rows are added that its ranks did measure; UsageError, before
    any starts, for more ranks than the machine should be given.
    """
    check_ranks(jobs)
    for job in jobs:
        parts: Parts = {kind: [[] for _ in range(job.num_processes)] for kind in KINDS}
        try:
            _run(job, parts, display, timeout)
        finally:
            _add(results, job, parts)


Parts: TypeAlias = dict[str, list[list[dict[str, Any]]]]
"""What each rank of a job reported, by kind of event: `parts[kind][rank]`."""

KINDS = ("row", "training")


def _add(results: Results, job: Job, parts: Parts) -> None:
    """Add the rows that every rank reported, and the training of rank 0."""
    rows = list(zip(*parts["row"], strict=False))
    results.rows += [merge(list(ranks)) for ranks in rows]
    results.training += parts["training"][0]
    for row, *_ in rows if job.timeline else ():
        title = f"{row['frontend']} on {job.name}, {row['schedule']}"
        measured, simulated = decode(row["timeline"])
        results.timelines.append((f"{title}: measured", measured))
        results.timelines.append((f"{title}: simulated from measured task times", simulated))


def _run(job: Job, parts: Parts, display: Display, timeout: float) -> None:
    """Run a job; what its ranks report is added to `parts` as it comes."""

    def listen(rank: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in parts:
            parts[kind][rank].append(event["row"])
        elif kind == "progress" and rank == 0:
            display.show(event["what"], event["done"], event["total"])

    display.show(f"{job.name}: starting", 0, None)
    run_job(job, listen, timeout=timeout)


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _finite(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [_finite(item) for item in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
