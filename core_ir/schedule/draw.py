"""A timeline as a small text picture: a row a rank, time to the right, dots where a rank idles."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from plait.core_ir.schedule.checks import check_is
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import OPT
from plait.core_ir.schedule.palette import SHADES, TASK_LEGEND, color_of, ink_on, rgb
from plait.core_ir.schedule.timeline import TimedAction, Timeline

_MAX_COLUMNS = 400


class Span(NamedTuple):
    """Text on one colour, `#rrggbb`; None for what has no task."""

    text: str
    color: str | None


def draw(timeline: Timeline, max_columns: int = _MAX_COLUMNS, *, color: bool = False) -> str:
    """Every task as kind and microbatch, as long as it takes; the stage too where a rank has
    several.

        rank 0  F0 F1 ..... B0... B1...
        rank 1  ...F0 B0... F1 B1......

    With `color`, ANSI escapes colour each task by its kind, darker for later stages of a rank, and
    only the microbatch is written; a legend follows.

    Every label fits unless lines would be longer than `max_columns`. Then the shortest task gets as
    many whole columns as there are, and a label that does not fit is not cut but left away: without
    `color` the kind stays. A last line counts the tasks that got no column. Where no task takes any
    time, a sentence says so instead.
    """
    rows = draw_spans(timeline, max_columns, microbatch_only=color)
    if not rows:
        return "nothing to draw: no task takes any time"
    drawn = sum(span.color is not None for row in rows for span in row)
    missing = sum(task.end > task.start for task in timeline.tasks) - drawn
    if color:
        rows.append(legend_spans())
    lines = ["".join(_colored(span) if color else span.text for span in row) for row in rows]
    if missing:
        lines.append(f"too narrow for {missing} of {missing + drawn} tasks")
    return "\n".join(line.rstrip() for line in lines)


def legend_spans() -> list[Span]:
    """The colours of `draw_spans` with what they mean."""
    spans = []
    for color, name in TASK_LEGEND:
        spans += [Span(f" {name} ", color), Span(" ", None)]
    return [*spans, Span(f"{SHADES}   .: bubble", None)]


def draw_spans(
    timeline: Timeline, max_columns: int = _MAX_COLUMNS, *, microbatch_only: bool = True
) -> list[list[Span]]:
    """The picture of `draw` as spans of text with their colours, a list a rank."""
    check_is(timeline, Timeline, "what is drawn", "a Timeline")
    tasks = [task for task in timeline.tasks if task.end > task.start]
    if not tasks:
        return []
    placement = timeline.schedule.placement
    num_ranks = timeline.schedule.num_ranks
    several = len(set(placement)) < timeline.schedule.num_stages
    labels = [
        (microbatch_of(task.action), "") if microbatch_only else _labels_of(task.action, several)
        for task in tasks
    ]
    head = len(f"rank {num_ranks - 1}  ")
    origin = min(task.start for task in tasks)
    scale = _scale(tasks, [names[0] for names in labels], timeline.makespan, max_columns - head)
    width = round(timeline.makespan * scale)
    rows = [[Span(f"{f'rank {rank}':<{head}}", None)] for rank in range(num_ranks)]
    drawn = [0] * num_ranks
    for task, names in zip(tasks, labels, strict=True):
        begin, end = round((task.start - origin) * scale), round((task.end - origin) * scale)
        row, color = rows[task.rank], color_of(task.action, placement)
        if begin > drawn[task.rank]:
            row.append(Span("." * (begin - drawn[task.rank]), None))
        if end > begin:
            # Neighbours are kept apart by a blank behind the label, or by their colours.
            apart = microbatch_only and color != row[-1].color
            whole = (task.end - task.start) * scale > 1 - 1e-9
            text = _fitted(names if whole else names[-1:], end - begin, blank=not apart)
            row.append(Span(text, color))
        drawn[task.rank] = end
    for row, end in zip(rows, drawn, strict=True):
        if end < width:
            row.append(Span("." * (width - end), None))
    return rows


def _scale(
    tasks: Sequence[TimedAction], labels: Sequence[str], makespan: float, max_columns: int
) -> float:
    """Columns a unit of time: every label fits, else whole columns for the shortest task, else less."""
    durations = [task.end - task.start for task in tasks]
    wanted = max((len(label) + 1) / time for label, time in zip(labels, durations, strict=True))
    columns = max(max_columns, 1) / makespan
    shortest = min(durations)
    return min(wanted, math.floor(columns * shortest) / shortest or columns)


def _fitted(names: Sequence[str], width: int, *, blank: bool) -> str:
    """The first name that fits, with a `blank` behind; in a single column there is room for none."""
    room = width - 1 if blank and width > 1 else width
    return f"{next((name for name in names if len(name) <= room), ''):<{width}}"


def _labels_of(action: Action, several: bool) -> tuple[str, ...]:
    """From the full label to one letter."""
    short = "&" if action.kind.is_pair else str(action.kind)[0]
    return label_of(action, several), label_of(action, with_stage=False), short


def label_of(action: Action, with_stage: bool) -> str:
    """Kind and microbatch, with the stage where a rank has several: `F0`, `3I0`, `0F2&3B1`, `OPT`."""
    if not action.kind.is_compute:
        return "OPT" if action.kind is OPT else str(action)
    parts = [f"{p.stage if with_stage else ''}{p.kind}{p.microbatch}" for p in action.parts]
    return "&".join(parts)


def microbatch_of(action: Action) -> str:
    """The microbatch alone: `3`, `2&1` of a pair; the kind where there is none."""
    numbers = [str(part.microbatch) for part in action.parts if part.microbatch is not None]
    return "&".join(numbers) or str(action)


def _colored(span: Span) -> str:
    if span.color is None:
        return span.text
    # A thin edge at the end of the task, where plain text has its blank.
    text = f"{span.text[:-1]}▕" if len(span.text) > 1 and span.text.endswith(" ") else span.text
    paper, ink = (";".join(map(str, rgb(color))) for color in (span.color, ink_on(span.color)))
    return f"\x1b[48;2;{paper};38;2;{ink}m{text}\x1b[0m"
