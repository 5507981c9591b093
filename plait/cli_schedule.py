"""`plait schedule`: what schedules there are, how they look, what they cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from plait.core_ir.errors import UsageError
from plait.core_ir.schedule import registry
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import Times

app = typer.Typer(help="List, show, simulate and export schedules.", no_args_is_help=True)

Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="A name, or a CSV file.")]
Ranks: TypeAlias = Annotated[int, typer.Option(min=1, help="Ranks.")]
Microbatches: TypeAlias = Annotated[int, typer.Option(min=1, help="Microbatches.")]
StagesPerRank: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Stages of a rank, where the schedule leaves them open.")
]
Cost: TypeAlias = Annotated[
    str, typer.Option(help="A time in any unit: one number, or one per stage by comma.")
]


@app.command("list")
def list_() -> None:
    """The schedules there are, with their bubble and their memory.

    p ranks, m microbatches, v stages a rank; F, I, W are times of tasks. Memory counts stage activations.
    """
    table = Table()
    for column in ("name", "what it does", "bubble", "memory", "needs"):
        table.add_column(column, overflow="fold")
    for recipe in registry.recipes():
        table.add_row(recipe.name, recipe.summary, recipe.bubble, recipe.memory, recipe.needs)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table, markup=False)


@app.command()
def show(
    name: Name,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    stages_per_rank: StagesPerRank = None,
    f: Cost = "1",
    i: Cost = "1",
    w: Cost = "1",
    comm: Annotated[float, typer.Option(min=0, help="Latency of a transfer.")] = 0.0,
    text: Annotated[bool, typer.Option("--text", help="The actions instead of a picture.")] = False,
) -> None:
    """A picture of a schedule in time, a row a rank; or its actions as text."""
    schedule = _schedule(name, ranks, microbatches, stages_per_rank)
    print(schedule if text else schedule.draw(_times(schedule, f, i, w, comm)))


@app.command()
def simulate(
    name: Name,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    stages_per_rank: StagesPerRank = None,
    f: Cost = "1",
    i: Cost = "1",
    w: Cost = "1",
    comm: Annotated[float, typer.Option(min=0, help="Latency of a transfer.")] = 0.0,
) -> None:
    """What a schedule costs under given times of its tasks."""
    schedule = _schedule(name, ranks, microbatches, stages_per_rank)
    timeline = schedule.simulate(_times(schedule, f, i, w, comm))
    peaks = ", ".join(str(peak) for peak in timeline.peak_activations)
    print(f"makespan          {timeline.makespan:g}")
    print(f"longest span      {timeline.longest_span:g}")
    print(f"bubble rate       {timeline.bubble_rate:.4f}")
    print(f"span bubble rate  {timeline.span_bubble_rate:.4f}")
    print(f"peak activations  {peaks}")


@app.command()
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="Where to write.")],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    stages_per_rank: StagesPerRank = None,
) -> None:
    """Write a schedule as a CSV file, as torch.distributed.pipelining reads and writes them."""
    schedule = _schedule(name, ranks, microbatches, stages_per_rank)
    try:
        schedule.to_csv(file)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None


def _schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> Schedule:
    if name.endswith(".csv"):
        schedule = Schedule.from_csv(name)
        schedule.validate()
        return schedule
    return registry.build(name, ranks, microbatches, stages_per_rank=stages_per_rank)


def _times(schedule: Schedule, f: str, i: str, w: str, comm: float) -> Times:
    return Times(f=_cost(f, "f"), i=_cost(i, "i"), w=_cost(w, "w"), comm=comm)


def _cost(text: str, option: str) -> float | Sequence[float]:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"--{option} takes numbers by comma, got {text!r}") from None
    return numbers[0] if len(numbers) == 1 else numbers
