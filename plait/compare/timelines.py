"""A row's measured timeline on its way from a worker, and beside the simulated one in a picture."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.timeline import Timeline
from plait.core_ir.schedule.times import Times

_PER_EDGE = ("comm", "transfer")


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


def _plain(cost: Any) -> Any:
    if isinstance(cost, Mapping):
        return [[source, target, value] for (source, target), value in cost.items()]
    return cost
