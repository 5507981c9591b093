"""A timeline as trace events, for ui.perfetto.dev and chrome://tracing.

NOTE: viewers drop an event that overlaps another of its thread without lying inside it. So times are
whole microseconds, rounded at both ends, and a message gets a lane that is free. They look threads
up by number alone, take 0 for an idle machine, and bind an arrow to what stands before it in the
file.
"""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from plait.core_ir.schedule.picture import Box, Panel, Titled, panels_of
from plait.core_ir.schedule.timeline import Timeline


def render_trace(timelines: Timeline | Titled, *, us_per_unit: float = 1000.0) -> str:
    """The text of a JSON trace file: a process a rank, with threads for its two lanes.

    `us_per_unit` turns the unit of the timeline into microseconds, which are rounded: 1e6 for
    seconds; a unit without a name is shown as a millisecond. Messages are events of the sender's
    communication lane (of several where they are on their way at once) with an arrow to the task
    that reads them, memory is a counter. Several timelines, by title, are groups of processes.
    """
    panels = panels_of(timelines)
    num_processes = sum(panel.num_ranks for panel in panels)
    arrows = count(1)
    events: list[dict[str, Any]] = []
    first = 1
    for panel in panels:
        prefix = f"{panel.title}: " if len(panels) > 1 else ""
        # A thread of process `pid` has the number `pid + lane * num_processes`.
        lanes = _lanes(panel)
        threads = {(box.rank, lane) for box, lane in lanes} | {
            (r, 0) for r in range(panel.num_ranks)
        }
        for rank, lane in sorted(threads):
            where = {"pid": first + rank, "tid": first + rank + lane * num_processes}
            names = (f"{prefix}rank {rank}", "communication" if lane else "compute")
            events += _names(where, *names)
        for box, lane in lanes:
            where = {"pid": first + box.rank, "tid": first + box.rank + lane * num_processes}
            events.append(_run(box, where, "message" if lane else "task", us_per_unit))
            if box.reader is not None:
                reader = {"pid": first + box.reader, "tid": first + box.reader}
                events += _arrow(next(arrows), box, where, reader, us_per_unit)
        events += _memory(panel, first, us_per_unit)
        first += panel.num_ranks
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _lanes(panel: Panel) -> list[tuple[Box, int]]:
    """Every box with the lane it runs on: 0 for tasks, the first free one for messages."""
    lanes = [(box, 0) for box in panel.tasks]
    free: dict[tuple[int, int], float] = {}
    for box in sorted(panel.messages, key=lambda box: box.start):
        lane = next(n for n in count(1) if free.get((box.rank, n), 0.0) <= box.start)
        free[box.rank, lane] = box.end
        lanes.append((box, lane))
    return lanes


def _names(where: dict[str, int], process: str, thread: str) -> Iterator[dict[str, Any]]:
    for what, name, number in (("process", process, "pid"), ("thread", thread, "tid")):
        yield {"ph": "M", "name": f"{what}_name", **where, "args": {"name": name}}
        sorting = {"sort_index": where[number]}
        yield {"ph": "M", "name": f"{what}_sort_index", **where, "args": sorting}


def _run(box: Box, where: dict[str, int], category: str, scale: float) -> dict[str, Any]:
    start, end = round(box.start * scale), round(box.end * scale)
    head = {"ph": "X", "name": box.name, "cat": category, **where}
    return {**head, "ts": start, "dur": end - start, "args": {"microbatch": box.label}}


def _arrow(
    number: int, box: Box, where: dict[str, int], reader: dict[str, int], scale: float
) -> Iterator[dict[str, Any]]:
    arrow = {"name": "read by", "cat": "message", "id": number}
    yield {"ph": "s", **arrow, **where, "ts": round(box.start * scale)}
    yield {"ph": "f", "bp": "e", **arrow, **reader, "ts": round(box.read_at * scale)}


def _memory(panel: Panel, first: int, scale: float) -> Iterator[dict[str, Any]]:
    unit = panel.memory_unit or "held"
    for pid, (times, amounts) in enumerate(panel.memory, first):
        for time, amount in zip(times, amounts, strict=True):
            counter = {"ph": "C", "name": "memory", "pid": pid, "tid": pid}
            yield {**counter, "ts": round(time * scale), "args": {unit: amount}}
