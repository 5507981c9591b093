"""What pictures of timelines show, apart from how: boxes on lanes, messages, memory over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import checked_list
from plait.core_ir.schedule.draw import label_of, microbatch_of
from plait.core_ir.schedule.palette import MESSAGE_COLOR, color_of
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Memory
from plait.core_ir.schedule.transfers import Transfers

# Several timelines on one scale, by title: a measured one beside a simulated one.
Titled = Sequence[tuple[str, Timeline]]


@dataclass(frozen=True)
class Box:
    """A task or a message on the lane of a rank; `label` fits inside, `name` is shown on demand.

    A message is read by the task that starts at `read_at` on rank `reader`.
    """

    rank: int
    start: float
    end: float
    label: str
    name: str
    color: str
    reader: int | None = None
    read_at: float = 0.0


@dataclass(frozen=True)
class Panel:
    """One timeline from time 0. `messages` run on the sender's communication lane.

    `memory` has (times, amounts) a rank, in `memory_unit` where that is known; an amount holds until
    the next time, which is later.
    """

    title: str
    summary: str
    num_ranks: int
    tasks: tuple[Box, ...]
    messages: tuple[Box, ...]
    memory: tuple[tuple[list[float], list[float]], ...]
    memory_unit: str
    end: float


def panels_of(timelines: Timeline | Titled, unit: str = "") -> tuple[Panel, ...]:
    """A panel for each timeline; one without a title is called by its schedule's name.

    `unit` is that of the times, for the reader.
    """
    if isinstance(timelines, Timeline):
        timelines = [(timelines.schedule.name, timelines)]
    timelines = checked_list(timelines, "what is drawn")
    if not timelines:
        raise ScheduleError("a picture needs at least one timeline")
    return tuple(_panel(title, timeline, unit) for title, timeline in timelines)


def _panel(title: str, timeline: Timeline, unit: str) -> Panel:
    schedule = timeline.schedule
    origin = float(timeline.start.min()) if timeline.start.size else 0.0
    several = len(set(schedule.placement)) < schedule.num_stages
    tasks = []
    for rank, action, start, end in timeline.tasks:
        if end <= start:
            continue
        label = microbatch_of(action)
        name = label_of(action, several)
        color = color_of(action, schedule.placement)
        tasks.append(Box(rank, start - origin, end - origin, label, name, color))
    return Panel(
        title,
        _summary(timeline, unit),
        schedule.num_ranks,
        tuple(tasks),
        _messages(timeline, timeline.transfers, origin) if timeline.transfers else (),
        tuple(_held(timeline, rank, origin) for rank in range(schedule.num_ranks)),
        "stage activations" if timeline.memory == Memory() else "",
        timeline.makespan,
    )


def _summary(timeline: Timeline, unit: str) -> str:
    schedule = timeline.schedule
    counts = (
        (schedule.num_ranks, "rank"),
        (schedule.num_stages, "stage"),
        (schedule.num_microbatches, "microbatch"),
    )
    spans = (
        ("makespan", timeline.makespan, timeline.bubble_rate),
        ("longest span of a rank", timeline.longest_span, timeline.span_bubble_rate),
    )
    peak = timeline.peak_activations.max(initial=0)
    return "; ".join(
        (
            ", ".join(_counted(*count) for count in counts),
            *(
                f"{name} {cost:g}{unit and ' '}{unit} (bubble {rate:.1%})"
                for name, cost, rate in spans
            ),
            f"at most {_counted(peak, 'stage activation')} on a rank",
        )
    )


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _held(timeline: Timeline, rank: int, origin: float) -> tuple[list[float], list[float]]:
    time, amount = timeline.held(rank)
    time = (time - origin).clip(min=0.0)
    # What is freed and taken again at one time would be drawn as a dip.
    last = np.append(np.diff(time) > 0, True)
    return time[last].tolist(), amount[last].tolist()


def _messages(timeline: Timeline, transfers: Transfers, origin: float) -> tuple[Box, ...]:
    """From when a message is on the lane until it arrives."""
    schedule = timeline.schedule
    boxes = []
    for index in range(transfers.num_messages):
        start, arrival = transfers.start[index] - origin, transfers.arrival[index] - origin
        if arrival <= start:
            continue
        producer = schedule.action(transfers.producer[index])
        if transfers.edge[index] < 0:
            rank, label = int(timeline.rank[transfers.producer[index]]), str(producer.stage)
            boxes.append(
                Box(rank, float(start), float(arrival), label, str(producer), MESSAGE_COLOR)
            )
            continue
        edge = transfers.edges[transfers.edge[index]]
        microbatch = next(p.microbatch for p in producer.parts if p.stage == edge.source)
        target = schedule.placement[edge.target]
        name = (
            f"{edge.kind} {microbatch} of stage {edge.source} to stage {edge.target}, rank {target}"
        )
        rank = schedule.placement[edge.source]
        read_at = float(timeline.start[transfers.consumer[index]] - origin)
        span = float(start), float(arrival)
        boxes.append(Box(rank, *span, str(microbatch), name, MESSAGE_COLOR, target, read_at))
    return tuple(boxes)
