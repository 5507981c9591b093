"""When a schedule's actions run, given the times of its tasks, and what they hold meanwhile."""

from collections.abc import Iterable
from itertools import pairwise
from typing import get_args

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import check_is
from plait.core_ir.schedule.dependencies import cross_rank_waits, locate_tasks
from plait.core_ir.schedule.durations import durations
from plait.core_ir.schedule.edges import resolve_edges
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import OPT, REDUCE_GRAD
from plait.core_ir.schedule.rewrite import add_optimizer, strip_messages
from plait.core_ir.schedule.timeline import Sync, Timeline
from plait.core_ir.schedule.times import FloatArray, Memory, Times
from plait.core_ir.schedule.transfers import timed_with_transfers


def simulate(
    table: ActionTable,
    times: Times,
    memory: Memory | None = None,
    *,
    edges: Iterable[tuple[int, int, str]] | None = None,
    sync: Sync = "none",
) -> Timeline:
    """The timeline of a schedule whose ranks run their actions in order, each as early as it can.

    `edges` are (source stage, target stage, "activation" | "gradient"), by default those the
    schedule implies. A rank has two lanes: one computes, the other sends what goes to other ranks,
    as `times.transfer` and `times.comm` say; so the sends and receives of a lowered schedule are
    left out of the actions. UNSHARD and REDUCE_GRAD take none of a rank's computing: they occupy the other lane
    for `times.unshard` and `times.reduce_grad`.

    An optimizer time, a `sync`, or gradients that take time to reduce, add an OPT action to ranks without
    one: it waits for all that its rank reduces. `sync` is what it waits
    for: "none", its own rank; "barrier", the last task of all ranks, as clipping by the global norm
    or a check for overflow asks for; "post_validate", a state that runs through the ranks once, so
    that a rank steps at once and validates later (Qi et al., arXiv 2401.10241, section 4).

    Raises `ScheduleError` for a task done twice, a needed task that is missing or late, a
    deadlock, and times or memory that do not fit the stages.
    """
    if sync not in get_args(Sync):
        raise ScheduleError(f"sync must be one of {', '.join(get_args(Sync))}, got {sync!r}")
    check_is(times, Times, "times", "plait.Times")
    check_is(memory, Memory | None, "memory", "Memory")
    resolved = resolve_edges(table, edges)
    table = strip_messages(table)
    reduces = bool((table.kind == REDUCE_GRAD.code).any()) and np.any(
        np.asarray(times.reduce_grad) > 0
    )
    if sync != "none" or reduces or np.any(np.asarray(times.optimizer) > 0):
        table = add_optimizer(table)
    waits = cross_rank_waits(table, locate_tasks(table), resolved)
    duration = durations(table, times)
    start, end = timed_with_transfers(table, waits, resolved, duration, times)
    if sync != "none":
        _delay_steps(table, start, end, sync, times)
    return Timeline(table, start, end, memory or Memory(), times, resolved, sync)


def _delay_steps(
    table: ActionTable, start: FloatArray, end: FloatArray, sync: Sync, times: Times
) -> None:
    """Move the optimizer steps, which nothing follows, to where `sync` lets them start; in place."""
    steps = np.flatnonzero(table.kind == OPT.code)
    duration = end[steps] - start[steps]
    if sync == "barrier":
        start[steps] = start[steps].max(initial=0.0)
    else:
        comm = times.comm if isinstance(times.comm, float) else max(times.comm.values(), default=0)
        for earlier, later in pairwise(steps.tolist()):
            start[later] = max(start[later], start[earlier] + comm)
    end[steps] = start[steps] + duration
