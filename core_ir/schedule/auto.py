"""`auto`: the best schedule found for the task times at hand, on a loop or a V, in the memory at hand."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import B, F
from plait.core_ir.schedule.placement import loop, vee
from plait.core_ir.schedule.problem import Cost, check_limit, pose
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.search import search
from plait.core_ir.schedule.simulate import simulate
from plait.core_ir.schedule.times import Memory, Times
from plait.core_ir.schedule.turns import table_from_turns
from plait.core_ir.schedule.validate import keeps_limit

_UNIT_TIMES = Times(f=1, i=1, w=1)


def _build(request: Request) -> ActionTable:
    p, v = request.num_ranks, request.stages_per_rank
    placements = [loop(p, v)]
    if v == 2 and p > 1:
        placements.append(vee(p))
    return _search(request, placements)


def reorder(schedule: ActionTable, times: Times) -> ActionTable:
    """The best order found for other times, on the placement that `schedule` has; no worse than `schedule` itself."""
    p, m = schedule.num_ranks, schedule.num_microbatches
    request = Request(p, m, schedule.num_stages // p, times)
    return _search(request, [schedule.placement], [schedule])


def _search(
    request: Request, placements: Sequence[tuple[int, ...]], known: Sequence[ActionTable] = ()
) -> ActionTable:
    """The table of the least makespan, then the least span, among those found, known and with a name."""
    check_limit(request, placements, request.memory_limit)
    named = (table for table in _named(request) if table.placement in placements)
    tables = [table for table in (*known, *named) if _fits(table, request)]
    for placement in placements:
        naive = _one_by_one(request, placement)
        placed = [table for table in tables if table.placement == placement]
        problem = pose(request, placement, request.memory_limit)
        found = search("auto", problem, "makespan", placed)
        tables += [table for table in (naive, found) if table is not None and _fits(table, request)]
    best = min(tables, key=lambda table: _cost(table, request))
    return replace(best, name="auto")


def _named(request: Request) -> Iterator[ActionTable]:
    """Every schedule with a name for this shape; those that are searched for, in their own limits too."""
    for recipe in FAMILIES:
        if request.stages_per_rank != recipe.stages_per_rank and not recipe.stages_are_free:
            continue
        for limit in {request.memory_limit, None}:
            try:
                yield recipe.build(replace(request, memory_limit=limit))
            except ScheduleError:
                # Too few microbatches, or a limit that this one cannot keep.
                continue


def _one_by_one(request: Request, placement: Sequence[int]) -> ActionTable:
    """One microbatch at a time: slow, but what fits the least memory."""
    rows = []
    for rank in range(request.num_ranks):
        stages = [s for s, placed in enumerate(placement) if placed == rank]
        turns = [(F, s) for s in stages] + [(B, s) for s in reversed(stages)]
        rows.append(turns * request.num_microbatches)
    return table_from_turns("auto", placement, request.num_microbatches, rows)


def _fits(table: ActionTable, request: Request) -> bool:
    limit = request.memory_limit
    return limit is None or keeps_limit(table, request.memory or Memory(), limit)


def _cost(table: ActionTable, request: Request) -> Cost:
    timeline = simulate(table, request.times or _UNIT_TIMES)
    return timeline.makespan, timeline.longest_span


AUTO = Recipe(
    name="auto",
    summary="the best schedule found for these task times and memory, never slower than one above",
    bubble="least found",
    memory="memory_limit",
    needs="stages = v * ranks (v is stages_per_rank, 1 unless given; a loop, or a V where v is 2),"
    " any number of microbatches; takes times, memory, memory_limit",
    build=_build,
    stages_are_free=True,
)
