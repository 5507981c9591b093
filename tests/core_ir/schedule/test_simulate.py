"""Simulation against a slow oracle, the critical path, and counts done by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Action, Memory, Schedule, Times, build
from plait.core_ir.schedule import timing as timing_module
from plait.core_ir.schedule.kinds import OPT, OVERLAP_F_B, B, F, I, W

SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"])
UNIT = Times(1, 1, 1)


def duration(action: Action, times: Times) -> float:
    def of(value, stage):
        return value if isinstance(value, float) else value[stage]

    stage = action.stage
    if action.kind is OVERLAP_F_B:
        f, b = action.parts
        return duration(f, times) + duration(b, times) if times.fb is None else of(times.fb, stage)
    if action.kind is B and times.b is None:
        return of(times.i, stage) + of(times.w, stage)
    return of({F: times.f, I: times.i, W: times.w, B: times.b}[action.kind], stage)


def relax(schedule: Schedule, edges, times: Times) -> dict[Action, tuple[float, float]]:
    """Start and end of each action, by raising starts until every wait is kept."""
    rows = [schedule.rank(r) for r in range(schedule.num_ranks)]
    does = {}
    for row in rows:
        for action in row:
            for part in action.parts:
                for task in "IW" if part.kind is B else part.kind.name:
                    does[task, part.stage, part.microbatch] = action
    waits: list[tuple[Action, Action, float]] = []
    for row in rows:
        waits += [(later, earlier, 0.0) for earlier, later in itertools.pairwise(row)]
    for source, target, payload in edges:
        task = "F" if payload == "activation" else "I"
        apart = schedule.placement[source] != schedule.placement[target]
        for m in range(schedule.num_microbatches):
            waits.append((does[task, target, m], does[task, source, m], times.comm * apart))
    start = dict.fromkeys((action for row in rows for action in row), 0.0)
    changed = True
    while changed:
        changed = False
        for later, earlier, latency in waits:
            bound = start[earlier] + duration(earlier, times) + latency
            if start[later] < bound:
                start[later], changed = bound, True
    return {action: (begin, begin + duration(action, times)) for action, begin in start.items()}


@st.composite
def random_times(draw, num_stages: int) -> Times:
    number = st.integers(0, 9).map(float)
    value = st.one_of(number, st.lists(number, min_size=num_stages, max_size=num_stages))
    return Times(
        draw(value),
        draw(value),
        draw(value),
        b=draw(st.none() | value),
        fb=draw(st.none() | value),
        comm=draw(number),
    )


@given(seed=SEEDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_times_equal_the_oracle(legal_case, seed, data):
    schedule, edges = legal_case(seed)
    times = data.draw(random_times(schedule.num_stages))
    expected = relax(schedule, edges, times)
    timeline = schedule.simulate(times, edges=edges)
    assert {t.action: (t.start, t.end) for t in timeline.tasks} == expected
    assert [t.rank for t in timeline.tasks] == timeline.rank.tolist()


@given(seed=SEEDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_both_ways_to_the_times_agree(legal_case, seed, data):
    schedule, edges = legal_case(seed)
    times = data.draw(random_times(schedule.num_stages))
    loop = schedule.simulate(times, edges=edges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing_module, "_MANY_LANES", 1)
        sweep = schedule.simulate(times, edges=edges)
    assert np.array_equal(loop.start, sweep.start)
    assert np.array_equal(loop.end, sweep.end)


@given(seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_messages_do_not_change_the_times(legal_case, seed):
    schedule, edges = legal_case(seed)
    times = Times(2, 3, 1, comm=0.5)
    plain = schedule.simulate(times, edges=edges)
    lowered = schedule.lower(edges).simulate(times, edges=edges)
    assert lowered.tasks == plain.tasks


@given(name=NAMES, p=st.integers(1, 6), m=st.integers(1, 12), data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_schedule_beats_the_critical_path(name, p, m, data):
    number = st.integers(0, 9).map(float)
    stage_times = st.lists(number, min_size=p, max_size=p)
    f, i, w = data.draw(stage_times), data.draw(stage_times), data.draw(stage_times)
    comm = data.draw(number)
    schedule = build(name, p, m)
    schedule.validate(ordered_forward=range(p))
    timeline = schedule.simulate(Times(f, i, w, comm=comm))
    one_microbatch = sum(f) + sum(i) + w[0] + 2 * (p - 1) * comm
    one_rank = max(m * (a + b + c) for a, b, c in zip(f, i, w, strict=True))
    assert timeline.makespan >= max(one_microbatch, one_rank)
    assert timeline.makespan >= timeline.longest_span >= one_rank
    assert 0 <= timeline.span_bubble_rate <= timeline.bubble_rate <= 1
    assert timeline.bubble_rate < 1 or one_rank == 0


def sweep_memory(schedule: Schedule, timeline, activation, handover) -> list[float]:
    """The peak of each rank by adding and freeing at the times of the tasks."""
    peaks = []
    for rank in range(schedule.num_ranks):
        changes = []
        for position, task in enumerate(t for t in timeline.tasks if t.rank == rank):
            for part in task.action.parts:
                s = part.stage
                if part.kind is F:
                    changes.append((position, 0, activation[s]))
                if part.kind is I:
                    changes.append((position, 1, handover[s] - activation[s]))
                if part.kind is B:
                    changes.append((position, 1, -activation[s]))
                if part.kind is W:
                    changes.append((position, 1, -handover[s]))
        held = peak = 0
        for _, _, change in sorted(changes, key=lambda c: c[:2]):
            held += change
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


@given(seed=SEEDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_peak_memory_equals_the_oracle(legal_case, seed, data):
    schedule, edges = legal_case(seed)
    amounts = st.lists(
        st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages
    )
    activation = data.draw(amounts)
    handover = [data.draw(st.integers(0, a)) for a in activation]
    timeline = schedule.simulate(UNIT, Memory(activation, handover), edges=edges)
    assert timeline.peak_memory.tolist() == sweep_memory(schedule, timeline, activation, handover)
    ones = [1] * schedule.num_stages
    assert timeline.peak_activations.tolist() == sweep_memory(schedule, timeline, ones, ones)


def test_handover_is_what_w_still_holds():
    timeline = build("zb-h1", 4, 8).simulate(UNIT, Memory(activation=1.0, handover=0.25))
    assert timeline.peak_activations.tolist() == [4, 4, 4, 4]
    # Rank 3 holds one microbatch before its I and three to hand over.
    assert timeline.peak_memory.tolist() == [4.0, 3.25, 2.5, 1.75]


def test_pair_takes_its_own_time_or_that_of_its_tasks():
    pair = Action(OVERLAP_F_B, 0, 1, partner=Action(B, 1, 0))
    rows = [[Action(F, 0, 0), Action(F, 1, 0), pair, Action(B, 0, 0)]]
    rows[0] += [Action(F, 1, 1), Action(B, 1, 1), Action(B, 0, 1)]
    schedule = Schedule.from_actions("pair", [0, 0], 2, rows)
    schedule.validate()
    assert schedule.simulate(Times([1, 2], [3, 4], [5, 6])).tasks[2][2:] == (3.0, 14.0)
    assert schedule.simulate(Times(1, 1, 1, fb=[2.5, 7.0])).tasks[2][2:] == (2.0, 4.5)


def test_optimizer_step_follows_the_last_task_of_its_rank():
    timeline = build("zb-h1", 2, 3).simulate(Times(1, 1, 1, optimizer=[2, 5]))
    steps = {t.rank: t for t in timeline.tasks if t.action.kind is OPT}
    ends = {r: max(t.end for t in timeline.tasks if t.rank == r) for r in (0, 1)}
    plain = build("zb-h1", 2, 3).simulate(UNIT)
    for rank, time in ((0, 2.0), (1, 5.0)):
        last = max(t.end for t in plain.tasks if t.rank == rank)
        assert (steps[rank].start, steps[rank].end) == (last, last + time)
    assert timeline.makespan == max(ends.values())
    assert timeline.longest_span == plain.longest_span
    assert timeline.span_bubble_rate == plain.span_bubble_rate


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Times(-1, 1, 1), r"Times\.f must be .* not negative, got -1"),
        (lambda: Times(1, float("nan"), 1), r"Times\.i must be .* finite"),
        (lambda: Times(1, 1, "slow"), r"Times\.w must be a number or one per stage, got 'slow'"),
        (lambda: Times(1, 1, 1, comm=[1, 2]), r"Times\.comm must be a number or one per edge"),
        (lambda: Memory([[1]]), r"Memory\.activation must be a number or one per stage"),
        (
            lambda: build("1f1b", 3, 2).simulate(Times([1, 2], 1, 1)),
            r"Times\.f .* 3 stages, got 2 values",
        ),
    ],
)
def test_costs_that_do_not_fit_are_errors(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_missing_producer_is_an_error():
    rows = [[Action(F, 0, 0)], [Action(F, 1, 0), Action(F, 1, 1)]]
    schedule = Schedule.from_actions("hole", [0, 1], 2, rows)
    with pytest.raises(ScheduleError, match="rank 1, position 1: 1F1 needs the result of a task"):
        schedule.simulate(UNIT)


@pytest.mark.parametrize(
    "value", [None, "1", True, [], [True], ["1"], [None], 1e200, 1e-200, 1j, 10**400]
)
def test_what_is_no_time_is_an_error(value):
    with pytest.raises(ScheduleError, match=r"Times\.f must be a number or one per stage"):
        Times(value, 1, 1)


@pytest.mark.parametrize("key", ["a", (0,), (0, "1"), (0, 1.0)])
def test_what_is_no_edge_has_no_time(key):
    with pytest.raises(ScheduleError, match=r"Times\.comm"):
        Times(1, 1, 1, comm={key: 1})


@pytest.mark.parametrize("value", [1e100, 1e-100])
def test_the_largest_and_the_smallest_times_can_be_summed_and_drawn(value):
    schedule = build("1f1b", 2, 4)
    times = Times(value, value, value, transfer=value, slowdown=2)
    assert np.isfinite(schedule.simulate(times).end).all()
    assert "F0" in schedule.draw(times)


def test_arguments_of_the_wrong_kind_are_errors():
    schedule = build("1f1b", 2, 2)
    for call in (schedule.simulate, schedule.draw):
        with pytest.raises(ScheduleError, match=r"times must be plait\.Times, got 3"):
            call(3)
    for memory in (3, 0):
        with pytest.raises(ScheduleError, match=f"memory must be Memory, got {memory}"):
            schedule.simulate(UNIT, memory)
    with pytest.raises(ScheduleError, match="rank 9 is not one of the 2 ranks of '1f1b'"):
        schedule.simulate(UNIT).held(9)


def repeated(schedule: Schedule, num_steps: int) -> Schedule:
    """The schedule several times, one after the other, as one: what steps without a pause do."""
    m = schedule.num_microbatches
    rows = [
        [
            Action(action.kind, action.stage, action.microbatch + step * m)
            for step in range(num_steps)
            for action in schedule.rank(rank)
        ]
        for rank in range(schedule.num_ranks)
    ]
    return Schedule.from_actions("steps", schedule.placement, num_steps * m, rows)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "zbv"]),
    data=st.data(),
    alike=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_step_time_is_that_of_steps_in_a_row_or_more(name, data, alike):
    schedule = build(name, data.draw(st.integers(1, 4)), 6)
    number = st.integers(0, 9).map(float)
    stages = schedule.num_stages
    f, i, w = (
        data.draw(number if alike else st.lists(number, min_size=stages, max_size=stages))
        for _ in range(3)
    )
    times = Times(f, i, w, comm=data.draw(number))
    ends = [repeated(schedule, steps).simulate(times).makespan for steps in (8, 12)]
    step = (ends[1] - ends[0]) / 4
    found = schedule.simulate(times).step_time
    assert found == pytest.approx(step) if alike else found >= step - 1e-9
