"""`plait schedule`: what schedules there are, how they look, what they cost."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.core_ir.errors import ScheduleError, UsageError
from plait.core_ir.schedule import registry
from plait.core_ir.schedule.checks import checked_limit
from plait.core_ir.schedule.draw import draw
from plait.core_ir.schedule.html import render_html
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.svg import render_svg
from plait.core_ir.schedule.timeline import Sync, Timeline
from plait.core_ir.schedule.times import Times
from plait.core_ir.schedule.trace import render_trace

app = typer.Typer(help="List, show, simulate and export schedules.", no_args_is_help=True)

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="A name, or a CSV file.")]
Ranks: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Ranks. Default: 4; of a file, as many as it has.")
]
Microbatches: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Microbatches. Default: 8; of a file, as many as it has.")
]
StagesPerRank: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Stages of a rank, where the schedule leaves them open.")
]
Cost: TypeAlias = Annotated[
    str, typer.Option(help="A time in any unit: one number, or one per stage by comma.")
]
Comm: TypeAlias = Annotated[float, typer.Option(min=0, help="Latency of a transfer.")]
Transfer: TypeAlias = Annotated[
    float, typer.Option(min=0, help="For how long a transfer occupies the rank that sends.")
]
Optimizer: TypeAlias = Annotated[float, typer.Option(min=0, help="Time of the optimizer step.")]
Limit: TypeAlias = Annotated[
    float | None,
    typer.Option(help="The most stage activations that a rank may hold (for schedules searched)."),
]
Syncing: TypeAlias = Annotated[
    Sync,
    typer.Option(
        help="What the optimizer step waits for: nothing, all ranks, or all ranks behind it."
    ),
]
Picture: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE")]

SWEEP_RANKS = (2, 4, 8, 16)
SWEEP_FACTORS = (1, 2, 4, 8)

_WHERE_FORMULAS_HOLD = """\
Of p ranks, m microbatches, v stages a rank; F, I and W are a stage's times, FB that of a pair. They hold for equal
stages, no communication and 2 p microbatches or more, a multiple of p where stages go round. The bubble is the idle
time in the longest span of a rank: exact where W is no longer than F and I, on a V of stages where all three are
equal; a search finds no more."""


@app.command("list")
def list_() -> None:
    """The schedules there are, with their bubble and their memory in stage activations."""
    table = _table("name", "what it does", "bubble", "memory", "needs")
    for recipe in registry.recipes():
        table.add_row(recipe.name, recipe.summary, recipe.bubble, recipe.memory, recipe.needs)
    _print(table)
    print(_WHERE_FORMULAS_HOLD)


@app.command()
def show(
    name: Name,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    f: Cost = "1",
    i: Cost = "1",
    w: Cost = "1",
    comm: Comm = 0.0,
    transfer: Transfer = 0.0,
    optimizer: Optimizer = 0.0,
    memory_limit: Limit = None,
    sync: Syncing = "none",
    text: Annotated[bool, typer.Option("--text", help="The actions instead of a picture.")] = False,
    svg: Picture = None,
    html: Picture = None,
    trace: Picture = None,
) -> None:
    """A picture of a schedule in time, a row a rank; or its actions as text.

    Files instead: --svg, --html (to zoom, with times under the pointer and memory below), --trace (for Perfetto).
    With --text these are written as well.
    """
    times = _times(f, i, w, comm, transfer, optimizer)
    schedule = _schedule(name, ranks, microbatches, stages_per_rank, times, memory_limit)
    if text:
        print(schedule)
    timeline = schedule.simulate(times, sync=sync)
    titled = [(schedule.name, timeline)]
    if svg is not None:
        _write(svg, render_svg(titled))
    if html is not None:
        _write(html, render_html(titled))
    if trace is not None:
        _write(trace, render_trace(titled))
    if not (text or svg or html or trace):
        _draw(timeline)


@app.command()
def simulate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name, a CSV file, or `all`.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    f: Cost = "1",
    i: Cost = "1",
    w: Cost = "1",
    comm: Comm = 0.0,
    transfer: Transfer = 0.0,
    optimizer: Optimizer = 0.0,
    memory_limit: Limit = None,
    sync: Syncing = "none",
) -> None:
    """What a schedule costs under given times of its tasks.

    With `all`, every schedule on 2, 4, 8 and 16 ranks with 1, 2, 4 and 8 times as many microbatches, as one table;
    on other numbers where these are given.
    """
    times = _times(f, i, w, comm, transfer, optimizer)
    limit = checked_limit(memory_limit)
    if name == "all":
        _print(_all(ranks, microbatches, stages_per_rank, times, limit, sync))
        return
    schedule = _schedule(name, ranks, microbatches, stages_per_rank, times, limit)
    timeline = schedule.simulate(times, sync=sync)
    peaks = ", ".join(str(peak) for peak in timeline.peak_activations)
    print(f"makespan          {timeline.makespan:g}")
    print(f"longest span      {timeline.longest_span:g}")
    print(f"bubble rate       {timeline.bubble_rate:.4f}")
    print(f"span bubble rate  {timeline.span_bubble_rate:.4f}")
    print(f"step time         {timeline.step_time:g}")
    print(f"peak activations  {peaks}")


@app.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="Where to write.")],
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    f: Cost = "1",
    i: Cost = "1",
    w: Cost = "1",
    comm: Comm = 0.0,
    transfer: Transfer = 0.0,
    memory_limit: Limit = None,
) -> None:
    """Write a schedule as a CSV file, as torch.distributed.pipelining reads and writes them.

    Times are for schedules that are searched for.
    """
    times = _times(f, i, w, comm, transfer)
    _schedule(name, ranks, microbatches, stages_per_rank, times, memory_limit).to_csv(file)


def _all(
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    times: Times,
    memory_limit: float | None,
    sync: Sync,
) -> Table:
    table = _table(
        "name", "ranks", "microbatches", "makespan", "bubble rate", "span bubble rate", "peak"
    )
    for recipe in registry.recipes():
        for p in (ranks,) if ranks else SWEEP_RANKS:
            counts = (microbatches,) if microbatches else (p * factor for factor in SWEEP_FACTORS)
            for m in counts:
                figures = _figures(recipe.name, p, m, stages_per_rank, times, memory_limit, sync)
                table.add_row(recipe.name, str(p), str(m), *figures)
    return table


def _draw(timeline: Timeline) -> None:
    """To a terminal, as wide as it is and in the colours it has; else plain, and as wide as needed."""
    console = Console()
    if not console.is_terminal:
        print(draw(timeline))
    elif console.color_system is None or console.no_color:
        print(draw(timeline, console.width))
    else:
        picture = Text.from_ansi(draw(timeline, console.width, color=True))
        console.print(picture, soft_wrap=True, highlight=False)


def _figures(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
    times: Times,
    memory_limit: float | None,
    sync: Sync,
) -> tuple[str, ...]:
    try:
        schedule = _schedule(name, ranks, microbatches, stages_per_rank, times, memory_limit)
        timeline = schedule.simulate(times, sync=sync)
    except ScheduleError as error:
        return ("", "", "", str(error))
    return (
        f"{timeline.makespan:g}",
        f"{timeline.bubble_rate:.4f}",
        f"{timeline.span_bubble_rate:.4f}",
        str(max(timeline.peak_activations)),
    )


def _schedule(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    times: Times,
    memory_limit: float | None,
) -> Schedule:
    if name.endswith(".csv"):
        schedule = Schedule.from_csv(name)
        schedule.validate(memory_limit=memory_limit)
        per_rank, rest = divmod(schedule.num_stages, schedule.num_ranks)
        for asked, found, option in (
            (ranks, schedule.num_ranks, "--ranks"),
            (microbatches, schedule.num_microbatches, "--microbatches"),
            (stages_per_rank, None if rest else per_rank, "--stages-per-rank"),
        ):
            if asked not in (None, found):
                raise UsageError(f"{option} is {asked}, but {name} has its own: leave it out")
        return schedule
    return registry.build(
        name,
        ranks or 4,
        microbatches or 8,
        stages_per_rank=stages_per_rank,
        times=times,
        memory_limit=memory_limit,
    )


def _times(f: str, i: str, w: str, comm: float, transfer: float, optimizer: float = 0.0) -> Times:
    return Times(
        f=_cost(f, "f"),
        i=_cost(i, "i"),
        w=_cost(w, "w"),
        comm=comm,
        transfer=transfer,
        optimizer=optimizer,
    )


def _cost(text: str, option: str) -> float | Sequence[float]:
    try:
        # Digits of other scripts are numbers to Python.
        numbers = [float(number) for number in text.encode("ascii").split(b",")]
    except ValueError:
        raise UsageError(f"--{option} takes numbers by comma, got {text!r}") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    print(f"wrote {os.fspath(file)}")


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table, markup=False)
