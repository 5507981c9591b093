"""What pictures of timelines show, apart from how: boxes on lanes, messages, memory over time."""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.draw import label_of, microbatch_of
from plait.core_ir.schedule.palette import MESSAGE_COLOR, color_of
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.transfers import Transfers

# Several timelines on one scale, by title: a measured one beside a simulated one.
Titled = Sequence[tuple[str, Timeline]]


@dataclass(frozen=True)
class Box:
    """A task or a message on the lane of a rank; `label` fits inside, `name` is shown on demand."""

    rank: int
    start: float
    end: float
    label: str
    name: str
    color: str


@dataclass(frozen=True)
class Panel:
    """One timeline from time 0. `messages` run on the sender's communication lane.

    `memory` has (times, amounts) a rank; an amount holds until the next time.
    """

    title: str
    summary: str
    num_ranks: int
    tasks: tuple[Box, ...]
    messages: tuple[Box, ...]
    memory: tuple[tuple[list[float], list[float]], ...]
    end: float


def panels_of(timelines: Timeline | Titled) -> tuple[Panel, ...]:
    """A panel for each timeline; one without a title is called by its schedule's name."""
    if isinstance(timelines, Timeline):
        timelines = [(timelines.schedule.name, timelines)]
    if not timelines:
        raise ScheduleError("a picture needs at least one timeline")
    return tuple(_panel(title, timeline) for title, timeline in timelines)


def _panel(title: str, timeline: Timeline) -> Panel:
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
    memory = []
    for rank in range(schedule.num_ranks):
        time, amount = timeline.held(rank)
        memory.append(((time - origin).clip(min=0.0).tolist(), amount.tolist()))
    messages = _messages(timeline, timeline.transfers, origin) if timeline.transfers else ()
    summary = (
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches}"
        f" microbatches; makespan {timeline.makespan:g}, bubble {timeline.bubble_rate:.1%}, longest"
        f" span {timeline.longest_span:g}, bubble {timeline.span_bubble_rate:.1%}; at most"
        f" {timeline.peak_activations.max(initial=0)} stage activations"
    )
    return Panel(
        title, summary, schedule.num_ranks, tuple(tasks), messages, tuple(memory), timeline.makespan
    )


def _messages(timeline: Timeline, transfers: Transfers, origin: float) -> tuple[Box, ...]:
    """From when a message is on the lane until it arrives."""
    schedule = timeline.schedule
    boxes = []
    for index in range(transfers.num_messages):
        edge = transfers.edges[transfers.edge[index]]
        start, arrival = transfers.start[index] - origin, transfers.arrival[index] - origin
        if arrival <= start:
            continue
        producer = schedule.action(transfers.producer[index])
        microbatch = next(p.microbatch for p in producer.parts if p.stage == edge.source)
        target = schedule.placement[edge.target]
        name = (
            f"{edge.kind} {microbatch} of stage {edge.source} to stage {edge.target}, rank {target}"
        )
        rank = schedule.placement[edge.source]
        boxes.append(Box(rank, float(start), float(arrival), str(microbatch), name, MESSAGE_COLOR))
    return tuple(boxes)
