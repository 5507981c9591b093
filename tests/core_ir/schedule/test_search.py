"""Searches: against the optimum, against every named schedule, within memory, for any times."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import MissingExtraError, ScheduleError
from plait.core_ir.schedule import Memory, Recipe, Request, Schedule, Times, build, exact
from plait.core_ir.schedule import search as search_module
from plait.core_ir.schedule.auto import AUTO
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.grow import Policy, grow, policies
from plait.core_ir.schedule.order import Clock
from plait.core_ir.schedule.placement import loop, vee
from plait.core_ir.schedule.problem import lower_bound, pose
from plait.core_ir.schedule.search import search


class Case(NamedTuple):
    """A small problem; `on_v` places its stages on a V."""

    p: int
    m: int
    on_v: bool
    times: Times
    memory: Memory = Memory()
    memory_limit: float | None = None

    def request(self) -> Request:
        v = 2 if self.on_v else 1
        return Request(self.p, self.m, v, self.times, self.memory, self.memory_limit)

    def placement(self) -> tuple[int, ...]:
        return vee(self.p) if self.on_v else loop(self.p, 1)


HALF = Memory(2.0, 1.0)
# Equal and unequal stages, with and without communication, loops and Vs, with and without limits.
SMALL = {
    "equal": Case(3, 5, False, Times(4, 4, 4)),
    "equal, tight": Case(3, 5, False, Times(5, 6, 5), Memory(2.0), 6.0),
    "unequal": Case(3, 5, False, Times([3, 5, 2], [4, 5, 4], [6, 4, 6])),
    "unequal, slow links": Case(3, 5, False, Times([5, 2, 4], [4, 3, 6], [2, 5, 3], comm=2)),
    "unequal, memory of 1f1b": Case(3, 5, False, Times([3, 5, 2], [4, 5, 4], [6, 4, 6]), HALF, 6.0),
    "unequal, some memory": Case(3, 5, False, Times([2, 6, 3], [5, 4, 3], [1, 4, 6]), HALF, 8.0),
    "one slow stage": Case(4, 4, False, Times([2, 2, 6, 2], [3, 3, 6, 3], [2, 2, 5, 2], comm=1)),
    "two ranks": Case(2, 5, False, Times([6, 5], [6, 2], [5, 1], comm=2), HALF, 6.0),
    "V, equal": Case(3, 3, True, Times(4, 4, 4)),
    "V, equal, memory of 1f1b": Case(3, 3, True, Times(5, 5, 3, comm=2), HALF, 12.0),
    "V, unequal": Case(
        3, 3, True, Times([2, 4, 6, 5, 6, 2], [4, 6, 6, 2, 5, 3], [6, 4, 6, 4, 2, 2])
    ),
    "V, unequal, half the memory": Case(
        2, 3, True, Times([3, 2, 2, 2], [5, 6, 4, 2], [2, 5, 5, 3], comm=1), HALF, 6.0
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_search_is_within_two_percent_of_the_optimum(name):
    case = SMALL[name]
    request, placement = case.request(), case.placement()
    optimum = exact.solve(request, placement)
    assert optimum.cost == optimum.bound
    problem = pose(request, placement, case.memory_limit)
    for table in (optimum.table, search("found", problem, "makespan")):
        schedule = Schedule.from_table(table)
        schedule.validate(memory=case.memory, memory_limit=case.memory_limit)
        makespan = schedule.simulate(case.times).makespan
        if table is optimum.table:
            assert makespan == optimum.cost >= lower_bound(problem, "makespan")
        assert optimum.cost <= makespan <= 1.02 * optimum.cost


def test_search_by_span_is_within_two_percent_of_the_optimum():
    case = SMALL["equal"]
    request, placement = case.request(), case.placement()
    optimum = exact.solve(request, placement, objective="span")
    assert optimum.cost == optimum.bound
    found = search("found", pose(request, placement, None), "span")
    span = Schedule.from_table(found).simulate(case.times).longest_span
    assert span <= 1.02 * optimum.cost


def test_exact_search_says_what_it_cannot_do(monkeypatch):
    request = SMALL["equal"].request()
    with pytest.raises(ScheduleError, match="no schedule in 5 s: INFEASIBLE"):
        exact.solve(replace(request, memory_limit=0.5), (0, 1, 2), seconds=5)
    with pytest.raises(ScheduleError, match=r"counts times in whole thousandths .* got 0\.12345"):
        exact.solve(replace(request, times=Times(0.12345, 1, 1)), (0, 1, 2))
    monkeypatch.setattr(exact, "_cp", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'plait\[exact\]'"):
        exact.solve(request, (0, 1, 2))


@pytest.fixture
def _quick_search(monkeypatch):
    """Searches that stop early: what they promise does not depend on their effort."""
    monkeypatch.setattr(search_module, "_MOST_STEPS", 120)


# Hypothesis asks for this where a fixture stays the same over all examples.
ANY_SHAPE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NUMBER = st.integers(1, 9).map(float)


@st.composite
def requests(draw) -> Request:
    """Small shapes with any times; a limit between the least possible and plenty, or none."""
    p, v, m = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 7))
    n = p * v
    f, i, w, activation = (draw(st.lists(NUMBER, min_size=n, max_size=n)) for _ in range(4))
    handover = [draw(st.integers(0, 9)) for _ in range(n)]
    times = Times(f, i, w, comm=draw(st.integers(0, 4)))
    memory = Memory(activation, draw(st.none() | st.just(handover)), draw(st.integers(0, 3)))
    placements = [loop(p, v)] + [vee(p)] * (v == 2)
    least = min(
        max(
            sum(activation[s] + memory.parameters for s in range(n) if placement[s] == rank)
            for rank in range(p)
        )
        for placement in placements
    )
    limit = draw(st.none() | st.floats(1, 4).map(lambda share: share * least))
    return Request(p, m, v, times, memory, limit)


def named_schedules(request: Request) -> list[Schedule]:
    found = []
    for recipe in FAMILIES:
        if recipe.stages_per_rank != request.stages_per_rank and not recipe.stages_are_free:
            continue
        for limit in {None, request.memory_limit}:
            try:
                table = recipe.build(replace(request, memory_limit=limit))
            except ScheduleError:
                continue
            found.append(Schedule.from_table(table))
    return found


@pytest.mark.usefixtures("_quick_search")
@given(request=requests())
@ANY_SHAPE
def test_auto_is_legal_within_memory_and_never_worse_than_a_named_schedule(request):
    schedule = build(
        "auto",
        request.num_ranks,
        request.num_microbatches,
        stages_per_rank=request.stages_per_rank,
        times=request.times,
        memory=request.memory,
        memory_limit=request.memory_limit,
    )
    schedule.validate(
        memory=request.memory,
        memory_limit=request.memory_limit,
        ordered_forward=range(schedule.num_stages),
    )
    makespan = schedule.simulate(request.times).makespan
    for named in named_schedules(request):
        peak = max(named.simulate(request.times, request.memory).peak_memory)
        if request.memory_limit is None or peak <= request.memory_limit:
            assert makespan <= named.simulate(request.times).makespan, named.name
    problem = pose(request, schedule.placement, None)
    assert makespan >= lower_bound(problem, "makespan")


@pytest.mark.usefixtures("_quick_search")
@given(request=requests(), objective=st.sampled_from(["makespan", "span"]))
@ANY_SHAPE
def test_search_is_legal_and_within_memory(request, objective):
    placement = loop(request.num_ranks, request.stages_per_rank)
    problem = pose(request, placement, request.memory_limit)
    table = search("found", problem, objective)
    if table is None:
        # I and W apart need room for what is handed over.
        assert request.memory_limit is not None
        return
    schedule = Schedule.from_table(table)
    schedule.validate(memory=request.memory, memory_limit=request.memory_limit)
    timeline = schedule.simulate(request.times)
    cost = timeline.makespan if objective == "makespan" else timeline.longest_span
    assert cost >= lower_bound(problem, objective) - 1e-9


@given(request=requests(), policy=st.sampled_from(list(policies())))
@settings(max_examples=100, deadline=None)
def test_every_policy_grows_a_legal_order(request, policy):
    placement = loop(request.num_ranks, request.stages_per_rank)
    clock = Clock(pose(request, placement, None))
    rows = grow(clock.problem, policy)
    schedule = Schedule.from_table(clock.table("grown", rows))
    schedule.validate()
    start, end = clock.run(rows)
    timeline = schedule.simulate(request.times)
    assert clock.rows_of(schedule) == rows
    assert [start[t] for row in rows for t in row] == timeline.start.tolist()
    assert [end[t] for row in rows for t in row] == timeline.end.tolist()


def test_a_limit_stops_forwards_that_run_ahead():
    request = Request(4, 8, 1, Times(1, 1, 1))
    for limit, peak in ((None, 8), (3.0, 3), (1.0, 1)):
        problem = pose(request, loop(4, 1), limit)
        rows = grow(problem, Policy(0, 0, 1.0, 1.0))
        table = Schedule.from_table(Clock(problem).table("grown", rows))
        assert max(table.simulate(Times(1, 1, 1)).peak_activations) == peak


def test_auto_takes_a_loop_or_a_v():
    v_is_best = Times(1, 1, 1)
    assert build("auto", 4, 8, stages_per_rank=2, times=v_is_best).placement == vee(4)
    # A V would put the two slow stages on one rank.
    slow_ends = Times([9, 1, 1, 9], [9, 1, 1, 9], [9, 1, 1, 9])
    assert build("auto", 2, 6, times=slow_ends).placement == loop(2, 2)
    assert build("auto", 4, 8, times=Times([1] * 4, 1, 1)).placement == loop(4, 1)


@pytest.mark.usefixtures("_quick_search")
def test_searches_give_one_schedule_for_one_problem():
    times = Times([3, 5, 2], [4, 5, 4], [6, 4, 6], comm=1)
    for name in ("auto", "zb-2p"):
        assert build(name, 3, 5, times=times) == build(name, 3, 5, times=times)


def test_a_limit_that_nobody_can_keep_is_an_error_that_says_the_least():
    memory = Memory([2, 3, 4, 7], parameters=1)
    times = Times([1] * 4, 1, 1)
    message = "keeps a memory limit of 10.5; the least limit possible is 11, that of one"
    with pytest.raises(ScheduleError, match=message):
        build("auto", 2, 4, times=times, memory=memory, memory_limit=10.5)
    least = build("auto", 2, 4, times=times, memory=memory, memory_limit=11)
    assert max(least.simulate(times, memory).peak_memory) == 11
    with pytest.raises(ScheduleError, match="the least limit possible is 8"):
        build("zb-2p", 4, 4, memory=memory, memory_limit=7.9)


def test_a_handover_that_does_not_fit_leaves_the_fused_backward():
    memory = Memory(1.0, handover=3.0)
    with pytest.raises(ScheduleError, match="what I hands over to W does not fit"):
        build("zb-1p", 2, 4, memory=memory, memory_limit=2)
    schedule = build("auto", 2, 4, memory=memory, memory_limit=2)
    assert max(schedule.simulate(Times(1, 1, 1), memory).peak_memory) <= 2


@pytest.mark.parametrize(("name", "times_p"), [("zb-1p", 1), ("zb-2p", 2)])
def test_default_limits_are_multiples_of_p_activations(name, times_p):
    for p in (1, 2, 4, 6):
        timeline = build(name, p, 4 * p).simulate(Times(1, 1, 1), Memory(5.0))
        assert max(timeline.peak_memory) <= 5.0 * times_p * p
        assert timeline.longest_span - 12 * p <= (p - 1 if times_p == 1 else 0)


def test_searches_never_exceed_their_declared_bubble():
    for name in ("zb-1p", "zb-2p"):
        recipe: Recipe = next(r for r in FAMILIES if r.name == name)
        for p, (f, i, w) in ((3, (2, 3, 1)), (4, (3, 2, 2))):
            timeline = build(name, p, 3 * p, times=Times(f, i, w)).simulate(Times(f, i, w))
            bubble = eval(recipe.bubble, {"p": p, "F": f, "I": i, "W": w, "max": max})
            assert timeline.longest_span - 3 * p * (f + i + w) <= bubble


def test_auto_declares_what_it_takes():
    assert AUTO.stages_are_free
    assert "memory_limit" in AUTO.needs
    assert math.isinf(pose(Request(2, 2), (0, 1), None).limit[0])


def test_golden_zb_2p_of_four_ranks():
    schedule = build("zb-2p", 4, 8)
    assert [" ".join(map(str, schedule.rank(rank))) for rank in range(4)] == [
        "0F0 0F1 0F2 0F3 0F4 0F5 0F6 0I0 0F7 0I1 0W0 0I2 0W1 0I3 0W2 0I4 0W3 0I5 0W4 0I6 0W5 0I7"
        " 0W6 0W7",
        "1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1F6 1I2 1F7 1I3 1W0 1I4 1W1 1I5 1W2 1I6 1W3 1I7 1W4 1W5"
        " 1W6 1W7",
        "2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2F6 2I4 2F7 2I5 2W0 2I6 2W1 2I7 2W2 2W3 2W4 2W5"
        " 2W6 2W7",
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3F6 3I6 3F7 3I7 3W0 3W1 3W2 3W3 3W4 3W5"
        " 3W6 3W7",
    ]
    timeline = schedule.simulate(Times(1, 1, 1))
    assert (timeline.makespan, timeline.longest_span) == (27, 24)
    # The rank before the last waits for 3I0, not for 3W0, which the last rank leaves for the end.
    when = {str(task.action): task for task in timeline.tasks}
    assert when["2I0"].start == when["3I0"].end < when["3W0"].start
