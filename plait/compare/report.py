"""Comparisons for people: progress while they run, one table of rows, one of trainings."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

MEBIBYTE = 2**20
GIGABYTE = 10**9
WIDTH = 148
"""Columns that the tables need."""


class Display:
    """Progress on long work: a bar on a terminal, a line for each new piece of work elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = ""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
        )
        self._bar = Progress(*columns, Elapsed(), console=console, transient=True)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, what: str, done: int, total: int | None) -> None:
        """Say what is being done, and how much of it is."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=what, completed=done, total=total)
        elif what != self._shown:
            self._console.print(what, markup=False, highlight=False, soft_wrap=True)
        self._shown = what


def rows_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Loss, largest gradient difference, times measured and simulated, and memory; red where out of tolerance."""
    first = rows[0]
    is_sweep = len({row["microbatches"] for row in rows}) > 1
    title = ", ".join(
        [
            f"{first['model']}: {first['ranks']} ranks",
            f"{first['stages']} stages",
            *_mesh_fact(rows),
            *([] if is_sweep else [f"{first['microbatches']} microbatches"]),
            first["dtype"],
            first["device"],
        ]
    )
    table = _table(title, (*(["microbatches"] if is_sweep else []), *_NUMBERS))
    table.caption, table.caption_justify = _CAPTION, "left"
    for row in rows:
        cells = [row[name] for name in _NAMES]
        cells += [str(row["microbatches"])] if is_sweep else []
        cells += [
            f"{row['loss']:.6f}",
            f"{row['max_grad_error']:.1e}",
            f"{1e3 * row['step_seconds']['median']:.1f} ± {1e3 * row['step_seconds']['spread']:.1f}",
            f"{1e3 * row['simulated_step_seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['bubble_rate']:.1%}",
            f"{row['compile_seconds']:.1f}",
            f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}",
        ]
        table.add_row(*cells, style=None if row["within_tolerance"] else "red")
    return table


def _mesh_fact(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The mesh, if there is one: "mesh stage=2, data=2 (data parallel)"; sources may differ in what an axis is for."""
    if not rows[0]["mesh"]:
        return []
    axes = []
    for axis, size in rows[0]["mesh"].items():
        roles = dict.fromkeys(row["axis_roles"].get(axis, "") for row in rows)
        role = "; or ".join(role for role in roles if role)
        axes.append(f"{axis}={size}" + (f" ({role})" if role else ""))
    return [f"mesh {', '.join(axes)}"]


_NAMES = ("frontend", "backend", "engine", "schedule")
_NUMBERS = (
    "loss",
    "grad error",
    "step ms",
    "simulated",
    "tokens/s",
    "bubble",
    "compile s",
    "peak MiB",
)
_CAPTION = (
    "grad error: the largest difference to the unpipelined framework; step: median ± range of the middle half, "
    "compile excluded; simulated ms and bubble: from measured task times, for ranks that work at once; compile: a "
    "schedule after the first shares what was compiled; peak: of the fullest process"
)


def simulated_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Times, rates and memory of simulated steps; red, and marked, where a rank has too little memory."""
    first = rows[0]
    columns = [c for c in ("frontend", "microbatches") if len({row[c] for row in rows}) > 1]
    facts = [
        f"{first['model']} {first['config'] or ''}".strip(),
        f"{first['ranks']} ranks",
        *_mesh_fact(rows),
        *([] if "microbatches" in columns else [f"{first['microbatches']} microbatches"]),
        *([f"{first['batch_size']} rows", first["dtype"]] if first["dtype"] else []),
        first["hardware"]["name"],
    ]
    title = f"{facts[0]}, simulated: {', '.join(facts[1:])}"
    table = _table(title, _SIMULATED, ("schedule", *columns))
    table.caption, table.caption_justify = _SIMULATED_CAPTION, "left"
    for row in rows:
        low, high = (each(row["peak_memory_bytes"]) / GIGABYTE for each in (min, max))
        table.add_row(
            row["schedule"],
            *(str(row[column]) for column in columns),
            str(row["stages"]),
            f"{1e3 * row['simulated_step_seconds']:,.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['bubble_rate']:.1%}",
            f"{row['span_bubble_rate']:.1%}",
            f"{row['model_flops_utilisation']:.1%}",
            f"{low:.1f} to {high:.1f}" + ("" if row["fits"] else " too much"),
            style=None if row["fits"] else "red",
        )
    return table


_SIMULATED = ("stages", "step ms", "tokens/s", "bubble", "of spans", "MFU", "peak GB")
_SIMULATED_CAPTION = (
    "step: first action to last, the optimizer's included, by the cost model: equations one after the other, products "
    "at the hardware's rate, all else reading and writing memory, unfused; bubble: idle share of the step, and of the "
    "longest span of one rank; MFU: three times the forward's products by what the ranks could compute at the peak in "
    "a step; peak: of the emptiest and the fullest rank: parameters, gradients, Adam's state, and what microbatches "
    "hold between tasks"
)


def steps_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The simulated step of each schedule, transformation by transformation, and by how much it is shorter then."""
    first = rows[0]
    mesh = ", ".join(f"{axis} {size}" for axis, size in first["mesh"].items())
    sharded = f"; parameters sharded over {first['sharded_over']}" if first["sharded_over"] else ""
    columns = [
        f"{row['schedule']}, {row['microbatches']}"
        if len({r["microbatches"] for r in rows}) > 1
        else row["schedule"]
        for row in rows
    ]
    changes = "".join(f"; {name} {value}" for name, value in first["changes"].items())
    table = _table(f"step by step, ms: mesh {mesh}{sharded}{changes}", columns, ("",))
    table.caption, table.caption_justify = _STEPS_CAPTION, "left"
    for name in first["steps"]:
        cells = []
        for row in rows:
            seconds, baseline = row["steps"][name], row["steps"]["baseline"]
            cells.append(f"{1e3 * seconds:,.1f} {seconds / baseline - 1:+.1%}")
        table.add_row(name, *cells)
    return table


_STEPS_CAPTION = (
    "baseline: collectives stop compute, backwards are whole, parameters are gathered before the first task and "
    "gradients reduced behind the last; + split: weight gradients are tasks of their own; + sharding: gathering and "
    "reducing are tasks beside compute; + multiplex: a forward and a backward as one graph; + overlap: equations "
    "ordered so that collectives run beside compute"
)


def training_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Held-out losses before and after, and how fast it went."""
    title = f"{rows[0]['model']}: {rows[0]['steps']} training steps"
    table = _table(title, ("held-out loss before", "after", "seconds", "tokens/s"))
    for row in rows:
        table.add_row(
            *(row[name] for name in _NAMES),
            f"{row['loss_before']:.6f}",
            f"{row['loss_after']:.6f}",
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
        )
    return table


def _table(title: str, numbers: Sequence[str], names: Sequence[str] = _NAMES) -> Table:
    """Names to the left, numbers to the right; no cell is cut or wrapped, however narrow the terminal."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
