"""A timeline as trace events, for ui.perfetto.dev and chrome://tracing."""

import json
from collections.abc import Iterator
from typing import Any

from plait.core_ir.schedule.picture import Panel, Titled, panels_of
from plait.core_ir.schedule.timeline import Timeline

_COMPUTE, _COMMUNICATION = 0, 1


def render_trace(timelines: Timeline | Titled, *, us_per_unit: float = 1.0) -> str:
    """The text of a JSON trace file: a process a rank, with a thread for each of its two lanes.

    `us_per_unit` turns the unit of the timeline into microseconds: 1e6 for seconds. Messages are
    events of the sender's communication lane, memory is a counter. Several timelines, by title, are
    groups of processes.
    """
    panels = panels_of(timelines)
    events: list[dict[str, Any]] = []
    first_pid = 0
    for panel in panels:
        events += _events(panel, first_pid, us_per_unit, len(panels) > 1)
        first_pid += panel.num_ranks
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(panel: Panel, first_pid: int, scale: float, named: bool) -> Iterator[dict[str, Any]]:
    for rank in range(panel.num_ranks):
        pid = first_pid + rank
        name = f"{panel.title}: rank {rank}" if named else f"rank {rank}"
        yield _metadata("process_name", pid, {"name": name})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
        for tid, lane in ((_COMPUTE, "compute"), (_COMMUNICATION, "communication")):
            yield {**_metadata("thread_name", pid, {"name": lane}), "tid": tid}
        times, amounts = panel.memory[rank]
        for time, amount in zip(times, amounts, strict=True):
            yield {
                "ph": "C",
                "name": "memory",
                "pid": pid,
                "ts": time * scale,
                "args": {"held": amount},
            }
    for tid, boxes in ((_COMPUTE, panel.tasks), (_COMMUNICATION, panel.messages)):
        for box in boxes:
            yield {
                "ph": "X",
                "name": box.name,
                "pid": first_pid + box.rank,
                "tid": tid,
                "ts": box.start * scale,
                "dur": (box.end - box.start) * scale,
                "args": {"microbatch": box.label},
            }


def _metadata(name: str, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "args": args}
