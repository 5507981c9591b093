"""A row's measured timeline on its way from a worker, and beside the simulated one in a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from plait.core_ir.schedule.html import render_html
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Times

_PER_EDGE = ("comm", "transfer")
_DURATIONS = tuple(f.name for f in fields(Times) if f.name not in ("slowdown", "early"))
_MS = 1e3


def encode(measured: Timeline, simulated: Timeline) -> dict[str, Any]:
    """A measured step and a simulated one of the same schedule, as JSON takes it."""
    assert simulated.times is not None
    return {
        "schedule": str(measured.schedule),
        "start": measured.start.tolist(),
        "end": measured.end.tolist(),
        "times": {f.name: _plain(getattr(simulated.times, f.name)) for f in fields(Times)},
        "edges": simulated.edges,
    }


def decode(encoded: Mapping[str, Any]) -> tuple[Timeline, Timeline]:
    """The measured and the simulated timeline."""
    schedule = Schedule.from_text(encoded["schedule"])
    measured = Timeline(schedule, np.array(encoded["start"]), np.array(encoded["end"]))
    times = dict(encoded["times"])
    for name in _PER_EDGE:
        if isinstance(times[name], list):
            times[name] = {(source, target): cost for source, target, cost in times[name]}
    edges = [(source, target, kind) for source, target, kind in encoded["edges"]]
    return measured, schedule.simulate(Times(**times), edges=edges)


def render_page(timelines: Sequence[tuple[str, Timeline]]) -> str:
    """A page of timelines in seconds, by title, on one scale of milliseconds."""
    titled = [(title, _in_ms(timeline)) for title, timeline in timelines]
    return render_html(titled, title="Measured and simulated steps", unit="ms")


def _in_ms(timeline: Timeline) -> Timeline:
    times = timeline.times and replace(
        timeline.times, **{name: _scaled(getattr(timeline.times, name)) for name in _DURATIONS}
    )
    return replace(timeline, start=timeline.start * _MS, end=timeline.end * _MS, times=times)


def _scaled(cost: Any) -> Any:
    if isinstance(cost, Mapping):
        return {edge: value * _MS for edge, value in cost.items()}
    return None if cost is None else np.multiply(cost, _MS).tolist()


def _plain(cost: Any) -> Any:
    if isinstance(cost, Mapping):
        return [[source, target, value] for (source, target), value in cost.items()]
    return cost
