"""The search for a good order: grow orders by many policies, take the best, move its tasks.

Every step is drawn from a fixed seed and counted, not timed: one problem gives one schedule.
"""

from collections.abc import Iterable, Sequence

from plait.core_ir.schedule.grow import grow, policies
from plait.core_ir.schedule.improve import improve
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.order import Clock, Rows, cost_of
from plait.core_ir.schedule.problem import Cost, Objective, Problem, lower_bound

# How many tasks may be timed in moves: 8 ranks by 32 microbatches take some seconds.
_EFFORT = 2_000_000
_MOST_STEPS = 12_000
_NUM_STARTS = 6


def search(
    name: str, problem: Problem, objective: Objective, known: Iterable[ActionTable] = ()
) -> ActionTable | None:
    """The best order found that keeps the memory limits; None where no policy keeps them.

    `known` are schedules with the same placement, to start from as well.
    """
    clock = Clock(problem)
    starts = [grow(problem, policy) for policy in policies()]
    starts += [clock.rows_of(table) for table in known]
    ranked = _ranked(clock, starts, objective)
    if not ranked:
        return None
    enough = lower_bound(problem, objective)
    steps = min(_MOST_STEPS, _EFFORT // clock.num_tasks) // _NUM_STARTS
    found = [improve(clock, rows, objective, steps, enough) for _, rows in ranked[:_NUM_STARTS]]
    _, rows = min(found, key=lambda entry: entry[0])
    return clock.table(name, rows)


def _ranked(clock: Clock, starts: Sequence[Rows], objective: Objective) -> list[tuple[Cost, Rows]]:
    """The orders that can run within memory, each once, best first."""
    ranked = []
    for rows in {str(rows): rows for rows in starts}.values():
        if all(clock.fits(rank, row) for rank, row in enumerate(rows)):
            times = clock.run(rows)
            if times is not None:
                ranked.append((cost_of(rows, times, objective), rows))
    return sorted(ranked, key=lambda entry: entry[0])
