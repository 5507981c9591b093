"""When every action starts and ends if each lane runs its actions in order, as early as it can.

A lane is a rank's computing, or its sending. One answer, two ways to it: a loop over actions for
few lanes, a sweep over all lanes at once for many.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.ir import IntArray
from plait.core_ir.schedule.times import FloatArray

# From here on a sweep over all lanes beats a Python step for each of them (measured).
_MANY_LANES = 48


class Lanes(NamedTuple):
    """Actions in lanes: lane `l` runs `offsets[l]:offsets[l + 1]`, each for its `duration`.

    `sources[a]` are the actions on other lanes that `a` waits for (-1: none; those come last); what
    they produce arrives `delay`, of the same shape, after their end.
    """

    offsets: IntArray
    duration: FloatArray
    sources: IntArray
    delay: FloatArray


def earliest_times(
    lanes: Lanes, name: str, describe: Callable[[int], str]
) -> tuple[FloatArray, FloatArray]:
    """Start and end of every action: a longest path, in time linear in the actions.

    Raises `ScheduleError`, with the schedule's `name` and in words of `describe(action)`, when
    actions wait for each other in a circle.
    """
    run = _sweep_lanes if len(lanes.offsets) > _MANY_LANES else _loop_actions
    start, end, cursor = run(lanes)
    if (cursor < lanes.offsets[1:]).any():
        raise ScheduleError(f"schedule {name!r} deadlocks: {_circle(lanes, cursor, describe)}")
    return start, end


Run = tuple[FloatArray, FloatArray, IntArray]


def _loop_actions(lanes: Lanes) -> Run:
    offsets, duration, sources, delay = lanes
    # Most actions wait for one other or none: only the rest has a list of its own.
    num_actions, width = sources.shape
    first: list[int] = sources[:, 0].tolist() if width else [-1] * num_actions
    first_delay: list[float] = delay[:, 0].tolist() if width else [0.0] * num_actions
    more: dict[int, list[tuple[int, float]]] = {}
    for action, column in zip(*(axis.tolist() for axis in np.nonzero(sources >= 0)), strict=True):
        if column:
            entry = (int(sources[action, column]), float(delay[action, column]))
            more.setdefault(action, []).append(entry)
    lengths: list[float] = duration.tolist()
    cursor, last = offsets[:-1].tolist(), offsets[1:].tolist()
    clock = [0.0] * len(cursor)
    start = [0.0] * num_actions
    # An action that has not run has no end; entry -1, "waits for nothing", is before all time.
    end: list[float | None] = [None] * num_actions + [-np.inf]
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(cursor)))
    while runnable:
        lane = runnable.pop()
        action, now, stop = cursor[lane], clock[lane], last[lane]
        while action < stop:
            awaited = first[action]
            done = end[awaited]
            if done is not None:
                arrival = done + first_delay[action]
                if action in more:
                    for awaited, extra in more[action]:
                        done = end[awaited]
                        if done is None:
                            break
                        arrival = max(arrival, done + extra)
            if done is None:
                waiting.setdefault(awaited, []).append(lane)
                break
            if arrival > now:
                now = arrival
            start[action] = now
            now += lengths[action]
            end[action] = now
            if action in waiting:
                runnable += waiting.pop(action)
            action += 1
        cursor[lane], clock[lane] = action, now
    return np.array(start), np.array(end[:-1], dtype=np.float64), np.array(cursor)


def _sweep_lanes(lanes: Lanes) -> Run:
    offsets, duration, sources, delay = lanes
    # NaN marks an action not yet done; index -1, "waits for nothing", reads the entry put last.
    start = np.zeros(len(duration))
    end = np.full(len(duration) + 1, np.nan)
    end[-1] = -np.inf
    cursor, last = offsets[:-1].copy(), offsets[1:]
    clock = np.zeros(len(cursor))
    columns = list(zip(np.ascontiguousarray(sources.T), np.ascontiguousarray(delay.T), strict=True))
    active = np.flatnonzero(cursor < last)
    while active.size:
        action = cursor[active]
        arrival = np.full(active.size, -np.inf)
        for source, late in columns:
            np.maximum(arrival, end[source[action]] + late[action], out=arrival)
        ready = ~np.isnan(arrival)
        if not ready.any():
            break
        moved, action = active[ready], action[ready]
        start[action] = np.maximum(clock[moved], arrival[ready])
        end[action] = clock[moved] = start[action] + duration[action]
        cursor[moved] += 1
        active = active[cursor[active] < last[active]]
    return start, end[:-1], cursor


def _circle(lanes: Lanes, cursor: IntArray, describe: Callable[[int], str]) -> str:
    """Describe the circle of waits that holds up the lanes at `cursor`."""
    lane_of = np.repeat(np.arange(len(cursor)), np.diff(lanes.offsets))
    lane = int(np.flatnonzero(cursor < lanes.offsets[1:])[0])
    visited: list[int] = []
    steps: list[str] = []
    while lane not in visited:
        visited.append(lane)
        action = cursor[lane]
        awaited = next(s for s in lanes.sources[action] if s >= 0 and s >= cursor[lane_of[s]])
        steps.append(f"{describe(action)} waits for {describe(awaited)}")
        lane = int(lane_of[awaited])
    return "; ".join(steps[visited.index(lane) :])
