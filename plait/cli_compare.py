"""What `compare` and `train` do once their options are read: run or simulate, show tables, write files.

Whatever goes wrong in the middle, the rows that there are by then are shown and written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from plait.compare.events import MISUSES
from plait.compare.plan import Request, left_out, plan_jobs
from plait.compare.report import (
    WIDTH,
    Display,
    rows_table,
    simulated_table,
    steps_table,
    training_table,
)
from plait.compare.run import Results, check_page, check_writable, run_jobs
from plait.compare.simulate import simulate_rows
from plait.core_ir.errors import ExecutionError
from plait.core_ir.hardware import Hardware, describe


def run_and_show(
    request: Request, json: Path | None, timeout: float, timeline: Path | None = None
) -> None:
    """Run what is asked for. ExecutionError where rows do not agree with their framework, or a later one failed."""
    jobs = plan_jobs(request)
    _check_files(json, timeline)
    results = Results()
    with _kept(results, json, timeline):
        try:
            with Display(Console(stderr=True)) as display:
                run_jobs(jobs, display, results, timeout=timeout)
        finally:
            if not results.are_none:
                _show(results)
                _note(left_out(request))
    results.check()


def _check_files(json: Path | None, timeline: Path | None) -> None:
    check_page(timeline)
    for file in (json, timeline):
        check_writable(file)


@contextmanager
def _kept(results: Results, json: Path | None, timeline: Path | None) -> Iterator[None]:
    """Write the files in the end, and after an error those rows that there are; then it is no misuse any more."""
    try:
        yield
    except BaseException as error:
        if results.are_none:
            raise
        _write(results, json, timeline)
        if isinstance(error, MISUSES):
            raise ExecutionError(str(error)) from error
        raise
    _write(results, json, timeline)


def _write(results: Results, json: Path | None, timeline: Path | None) -> None:
    if json is not None:
        results.write_json(json)
    if timeline is not None:
        results.write_timelines(timeline)


def simulate_and_show(
    request: Request, hardware: Hardware, json: Path | None, timeline: Path | None
) -> None:
    """Simulate what is asked for."""
    results = Results()
    _check_files(json, timeline)
    with _kept(results, json, timeline):
        try:
            with Display(Console(stderr=True)) as display:
                for row, simulated in simulate_rows(request, hardware, display.show):
                    results.rows.append(row)
                    results.timelines.append((f"{row['frontend']}, {row['schedule']}", simulated))
        finally:
            if results.rows:
                _show_simulated(results, hardware)
        _note(left_out(request))
        Console().print(f"\n{describe(hardware)}", highlight=False, markup=False)


def _show_simulated(results: Results, hardware: Hardware) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(simulated_table(results.rows))
    if results.rows[0]["steps"]:
        console.print(steps_table(results.rows))
    leaving = sorted({axis for row in results.rows for axis in row["between_nodes"]})
    if leaving:
        console.print(
            f"warning: collectives inside tasks run between nodes of {hardware.ranks_per_node}, over "
            f"{', '.join(leaving)}: make the axis smaller, or the last of --mesh",
            highlight=False,
            markup=False,
            style="yellow",
        )


def _note(lines: Sequence[str]) -> None:
    for line in lines:
        Console(soft_wrap=True).print(
            f"note: {line}", highlight=False, markup=False, style="yellow"
        )


def _show(results: Results) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    if results.rows:
        console.print(rows_table(results.rows))
    if results.training:
        console.print(training_table(results.training))
