"""A timeline as a small text picture: a row a rank, time to the right, dots where a rank idles."""

from functools import partial
from typing import NamedTuple

from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.kinds import OPT
from plait.core_ir.schedule.palette import COLORS, color_of
from plait.core_ir.schedule.timeline import Timeline

_MAX_COLUMNS = 400


class Span(NamedTuple):
    """Text in one colour, `#rrggbb` behind black text; None for what has no task."""

    text: str
    color: str | None


def draw(timeline: Timeline, max_columns: int = _MAX_COLUMNS, *, color: bool = False) -> str:
    """Every task as kind and microbatch, as long as it takes; the stage too where a rank has
    several.

        rank 0  F0 F1 ..... B0... B1...
        rank 1  ...F0 B0... F1 B1......

    With `color`, ANSI escapes colour each task by its kind, darker for later stages of a rank, and
    only the microbatch is written; a legend follows.

    The shortest task gets the width of the longest label unless that takes more than `max_columns`;
    labels that do not fit are cut.
    """
    if not color:
        rows = draw_spans(timeline, max_columns, microbatch_only=False)
        return "\n".join("".join(span.text for span in row).rstrip() for row in rows)
    rows = draw_spans(timeline, max_columns)
    return "\n".join("".join(map(_colored, row)) for row in [*rows, legend_spans()] if rows)


def legend_spans() -> list[Span]:
    """The colours of `draw_spans` with what they mean."""
    spans = []
    for kind, color in COLORS.items():
        spans += [Span(f" {kind} ", color), Span(" ", None)]
    return [*spans, Span("darker: a later stage of the rank   .: idle", None)]


def draw_spans(
    timeline: Timeline, max_columns: int = _MAX_COLUMNS, *, microbatch_only: bool = True
) -> list[list[Span]]:
    """The picture of `draw` as spans of text with their colours, a list a rank."""
    tasks = [task for task in timeline.tasks if task.end > task.start]
    if not tasks:
        return []
    placement = timeline.schedule.placement
    several = len(set(placement)) < timeline.schedule.num_stages
    name = microbatch_of if microbatch_only else partial(label_of, with_stage=several)
    labels = [name(task.action) for task in tasks]
    shortest = min(task.end - task.start for task in tasks)
    origin = min(task.start for task in tasks)
    scale = (max(map(len, labels)) + 1) / shortest
    scale = min(scale, max_columns / timeline.makespan)
    width = round(timeline.makespan * scale)
    num_ranks = timeline.schedule.num_ranks
    head = len(f"rank {num_ranks - 1}")
    rows = [[Span(f"{f'rank {rank}':<{head}}  ", None)] for rank in range(num_ranks)]
    drawn = [0] * num_ranks
    for task, label in zip(tasks, labels, strict=True):
        begin, end = round((task.start - origin) * scale), round((task.end - origin) * scale)
        row = rows[task.rank]
        if begin > drawn[task.rank]:
            row.append(Span("." * (begin - drawn[task.rank]), None))
        # A blank behind each task keeps neighbours apart.
        text = f"{label[: max(end - begin - 1, 0)]:<{end - begin}}"
        row.append(Span(text, color_of(task.action, placement)))
        drawn[task.rank] = end
    for row, end in zip(rows, drawn, strict=True):
        if end < width:
            row.append(Span("." * (width - end), None))
    return rows


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
    red, green, blue = (int(span.color[at : at + 2], 16) for at in (1, 3, 5))
    # A thin edge at the end of the task, where plain text has its blank.
    text = f"{span.text[:-1]}▕" if span.text.endswith(" ") else span.text
    return f"\x1b[48;2;{red};{green};{blue};38;2;0;0;0m{text}\x1b[0m"
