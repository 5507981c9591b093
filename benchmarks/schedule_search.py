"""How good and how fast the searches are.

    python benchmarks/schedule_search.py

First `auto` on 8 ranks by 32 microbatches, unequal stages with communication, on a loop and on a V, beside the best
schedule with a name; then the gap to the proven optimum on small random problems (needs `pip install 'plait[exact]'`).
Exits with an error if a search takes 20 s or the median gap is above 2 %.
"""

import random
import statistics
import sys
import time

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Memory, Request, Schedule, Times, build
from plait.core_ir.schedule.exact import solve
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.placement import loop, vee
from plait.core_ir.schedule.problem import lower_bound, pose
from plait.core_ir.schedule.search import search

MOST_SECONDS = 20.0
MOST_GAP = 0.02


def main() -> int:
    slow = any([large(v, limit) for v, limit in ((1, None), (1, 12), (2, None), (2, 12), (2, 8))])
    gaps = sorted(small(seed) for seed in range(30))
    print(f"gap to the optimum: median {statistics.median(gaps):.2%}, largest {gaps[-1]:.2%}")
    return int(slow or statistics.median(gaps) > MOST_GAP)


def large(stages_per_rank: int, limit: float | None) -> bool:
    """Print one search on 8 ranks by 32 microbatches; True if it took too long."""
    p, m = 8, 32
    draw = random.Random(stages_per_rank)
    base = [draw.uniform(20, 30) for _ in range(p * stages_per_rank)]
    times = Times(
        f=base,
        i=[x * draw.uniform(0.9, 1.1) for x in base],
        w=[x * draw.uniform(0.6, 0.9) for x in base],
        comm=2.0,
    )
    begin = time.process_time()
    found = build("auto", p, m, times=times, memory_limit=limit)
    seconds = time.process_time() - begin
    named = []
    for recipe in FAMILIES:
        if stages_per_rank != recipe.stages_per_rank and not recipe.stages_are_free:
            continue
        try:
            schedule = build(
                recipe.name, p, m, stages_per_rank=stages_per_rank, times=times, memory_limit=limit
            )
        except ScheduleError:
            continue
        named.append((schedule.simulate(times).makespan, recipe.name))
    makespan = found.simulate(times).makespan
    bound = lower_bound(
        pose(Request(p, m, stages_per_rank, times), found.placement, None), "makespan"
    )
    best = (
        "none with a name fits" if not named else f"best named {min(named)[1]} {min(named)[0]:.0f}"
    )
    print(
        f"auto {p} x {m}, {stages_per_rank} a rank, limit {limit}: {seconds:.1f} s,"
        f" makespan {makespan:.0f}, {makespan / bound - 1:.1%} over the work bound; {best}"
    )
    return seconds > MOST_SECONDS


def small(seed: int) -> float:
    """The gap of the search to the optimum on one random problem, by makespan."""
    draw = random.Random(seed)
    on_v = draw.random() < 0.5
    p, m = draw.choice([(2, 4), (3, 3), (3, 4)] if on_v else [(2, 5), (3, 5), (4, 4)])
    placement = vee(p) if on_v else loop(p, 1)
    columns = [[float(draw.randint(1, 6)) for _ in placement] for _ in range(3)]
    times = Times(*columns, comm=float(draw.choice([0, 1, 2])))
    limit = draw.choice([None, 2.0 * p, 3.0 * p])
    if limit is not None:
        limit *= len(placement) / p
    request = Request(p, m, len(placement) // p, times, Memory(2.0, 1.0), limit)
    optimum = solve(request, placement, seconds=30)
    table = search("found", pose(request, placement, limit), "makespan")
    if table is None:
        raise AssertionError("a search must find an order where there is one")
    return Schedule.from_table(table).simulate(times).makespan / optimum.cost - 1


if __name__ == "__main__":
    sys.exit(main())
