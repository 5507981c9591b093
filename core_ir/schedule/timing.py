"""When every action starts and ends if each rank runs its actions in order, as early as it can.

One answer, two ways to it: a loop over actions for few ranks, a sweep over all ranks at once for
many.
"""

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.ir import ActionTable, IntArray

FloatArray = NDArray[np.float64]

# From here on a sweep over all ranks beats a Python step for each of them (measured).
_MANY_RANKS = 48


def earliest_times(
    table: ActionTable, sources: IntArray, duration: FloatArray, latency: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Start and end of every action: a longest path, in time linear in the actions.

    `sources[a]` are the actions on other ranks that `a` waits for (-1: none); what they produce
    arrives `latency` after their end. Raises `ScheduleError` when actions wait for each other in a
    circle.
    """
    run = _sweep_ranks if table.num_ranks >= _MANY_RANKS else _loop_actions
    return run(table, sources, duration, latency)


def _loop_actions(
    table: ActionTable, sources: IntArray, duration: FloatArray, latency: float
) -> tuple[FloatArray, FloatArray]:
    columns = [column.tolist() for column in sources.T]
    needs = list(zip(*columns, strict=True)) if columns else [()] * table.num_actions
    lengths = duration.tolist()
    cursor, last = table.offsets[:-1].tolist(), table.offsets[1:].tolist()
    clock = [0.0] * table.num_ranks
    start = [0.0] * table.num_actions
    end: list[float | None] = [None] * table.num_actions
    waiting: dict[int, list[int]] = {}
    runnable = list(range(table.num_ranks))
    while runnable:
        rank = runnable.pop()
        action, now, stop = cursor[rank], clock[rank], last[rank]
        while action < stop:
            awaited = -1
            for source in needs[action]:
                if source < 0:
                    break
                done = end[source]
                if done is None:
                    awaited = source
                    break
                if done + latency > now:
                    now = done + latency
            if awaited >= 0:
                waiting.setdefault(awaited, []).append(rank)
                break
            start[action] = now
            now += lengths[action]
            end[action] = now
            if action in waiting:
                runnable += waiting.pop(action)
            action += 1
        cursor[rank], clock[rank] = action, now
    if cursor != last:
        raise ScheduleError(_circle(table, sources, np.array(cursor)))
    return np.array(start), np.array(end, dtype=np.float64)


def _sweep_ranks(
    table: ActionTable, sources: IntArray, duration: FloatArray, latency: float
) -> tuple[FloatArray, FloatArray]:
    # NaN marks an action not yet done; index -1, "waits for nothing", reads the entry put last.
    start = np.zeros(table.num_actions)
    end = np.full(table.num_actions + 1, np.nan)
    end[-1] = -np.inf
    cursor, last = table.offsets[:-1].copy(), table.offsets[1:]
    clock = np.zeros(table.num_ranks)
    columns = np.ascontiguousarray(sources.T)
    active = np.flatnonzero(cursor < last)
    while active.size:
        action = cursor[active]
        arrival = np.full(active.size, -np.inf)
        for column in columns:
            np.maximum(arrival, end[column[action]], out=arrival)
        ready = ~np.isnan(arrival)
        if not ready.any():
            raise ScheduleError(_circle(table, sources, cursor))
        ranks, action = active[ready], action[ready]
        start[action] = np.maximum(clock[ranks], arrival[ready] + latency)
        end[action] = clock[ranks] = start[action] + duration[action]
        cursor[ranks] += 1
        active = active[cursor[active] < last[active]]
    return start, end[:-1]


def _circle(table: ActionTable, sources: IntArray, cursor: IntArray) -> str:
    """Describe the circle of waits that holds up the ranks at `cursor`."""
    ranks = table.rank_of_action
    blocked = np.flatnonzero(cursor < table.offsets[1:])
    rank = int(blocked[0])
    visited: list[int] = []
    steps: list[str] = []
    while rank not in visited:
        visited.append(rank)
        action = cursor[rank]
        awaited = next(s for s in sources[action] if s >= 0 and s >= cursor[ranks[s]])
        steps.append(f"{table.where(action)} waits for {table.where(awaited)}")
        rank = int(ranks[awaited])
    circle = steps[visited.index(rank) :]
    return f"schedule {table.name!r} deadlocks: " + "; ".join(circle)
