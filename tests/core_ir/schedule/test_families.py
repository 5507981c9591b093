"""The named schedules with several stages a rank: published figures, declared formulas, any shape."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Times, build, find
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.kinds import OVERLAP_F_B

UNIT = Times(1, 1, 1, fb=3)
# Searches have tests of their own.
ORDERS = [recipe for recipe in FAMILIES if recipe.name not in ("zb-1p", "zb-2p")]
LATER = ["interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev"]


def evaluate(formula: str, p: int, m: int, v: int, f=1, i=1, w=1, fb=3) -> int:
    names = {"p": p, "m": m, "v": v, "F": f, "I": i, "W": w, "FB": fb, "min": min, "max": max}
    return eval(formula, {"__builtins__": {}}, names)


def work(timeline) -> float:
    """The most that any rank works."""
    busy = timeline.end - timeline.start
    return max(busy[timeline.rank == rank].sum() for rank in set(timeline.rank.tolist()))


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan", "span"),
    [
        ("interleaved-1f1b", 4, 8, 57, 57),
        ("zbv", 4, 8, 51, 48),
        ("dualpipev", 4, 8, 54, 54),
        ("dualpipev", 8, 16, 110, 110),
    ],
)
def test_published_spans(name, p, m, makespan, span):
    timeline = build(name, p, m).simulate(UNIT)
    assert (timeline.makespan, timeline.longest_span) == (makespan, span)


@pytest.mark.parametrize("p", range(1, 9))
def test_zbv_idles_only_until_the_last_rank_starts(p):
    for m in (2 * p - 1, 2 * p, 5 * p):
        timeline = build("zbv", p, m).simulate(UNIT)
        assert timeline.longest_span == 6 * m
        assert timeline.makespan == 6 * m + p - 1


@pytest.mark.parametrize("p", range(1, 9))
def test_dualpipev_bubble_is_exact_by_makespan(p):
    for m in (2 * p, 3 * p, 5 * p):
        timeline = build("dualpipev", p, m).simulate(UNIT)
        f_and_b, b, w = 3, 2, 1
        assert timeline.makespan - 6 * m == (p - 1) * (f_and_b + b - 3 * w)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("interleaved-1f1b", lambda p: 3 * p - 1),
        ("interleaved-zb", lambda p: 3 * p - 1),
        ("looped-bfs", lambda p: 8 * p),
        ("zbv", lambda p: 2 * p),
        ("v-half", lambda p: 2 * ((p + 2) // 2)),
        ("v-min", lambda p: 2 * ((p + 4) // 3)),
        ("dualpipev", lambda p: 2 * p + 1),
    ],
)
def test_peak_activations_are_the_published_ones(name, peak):
    for p in range(1, 11):
        peaks = build(name, p, 4 * p).simulate(UNIT).peak_activations
        assert max(peaks) == peak(p) == evaluate(find(name).memory, p, 4 * p, 2)


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
def test_bubble_and_peak_are_the_declared_ones(name, p):
    for m in (2 * p, 3 * p, 5 * p):
        timeline = build(name, p, m).simulate(UNIT)
        recipe = find(name)
        assert timeline.longest_span - 6 * m == evaluate(recipe.bubble, p, m, 2)
        assert max(timeline.peak_activations) == evaluate(recipe.memory, p, m, 2)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs", "interleaved-zb"])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_stages_per_rank_are_free_where_stages_go_round(name, v):
    for p, (f, i, w) in product((1, 2, 4), ((1, 1, 1), (2, 3, 1), (3, 2, 2))):
        m = 4 * p
        timeline = build(name, p, m, stages_per_rank=v).simulate(Times(f, i, w))
        bubble = evaluate(find(name).bubble, p, m, v, f, i, w)
        assert timeline.longest_span - m * v * (f + i + w) == bubble
        assert max(timeline.peak_activations) == evaluate(find(name).memory, p, m, v)


def test_one_stage_a_rank_is_the_plain_schedule():
    for p, m in product((1, 2, 4), (4, 8)):
        assert build("looped-bfs", p, m, stages_per_rank=1) == build("gpipe", p, m)


def test_naive_runs_one_microbatch_at_a_time():
    for p, m in product((1, 2, 5), (1, 3)):
        timeline = build("naive", p, m).simulate(Times(1, 2, 3))
        assert timeline.makespan == 6 * p * m
        assert max(timeline.peak_activations) == 1
        assert timeline.makespan - 6 * m == evaluate(find("naive").bubble, p, m, 1, 1, 2, 3)


def test_dualpipev_names_the_least_number_of_microbatches():
    with pytest.raises(ScheduleError, match="on 4 ranks needs at least 8 microbatches, got 7"):
        build("dualpipev", 4, 7)


def test_dualpipev_pairs_both_ways():
    schedule = build("dualpipev", 2, 4)
    pairs = [str(a) for r in (0, 1) for a in schedule.rank(r) if a.kind is OVERLAP_F_B]
    assert pairs == [
        *("(0F3;3B1)OVERLAP_F_B", "(3F2;0B0)OVERLAP_F_B", "(3F3;0B1)OVERLAP_F_B"),
        *("(2F2;1B0)OVERLAP_F_B", "(1F3;2B1)OVERLAP_F_B", "(2F3;1B1)OVERLAP_F_B"),
    ]


@st.composite
def shapes(draw) -> tuple[str, int, int, int]:
    """Name, ranks, stages a rank, microbatches."""
    recipe = draw(st.sampled_from(ORDERS))
    p = draw(st.integers(1, 7))
    v = draw(st.integers(1, 3)) if recipe.stages_are_free else recipe.stages_per_rank
    least = 2 * p if recipe.name == "dualpipev" else 1
    return recipe.name, p, v, draw(st.integers(least, least + 15))


@given(shape=shapes(), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_shape_is_legal_and_not_faster_than_it_can_be(shape, data):
    name, p, v, m = shape
    schedule = build(name, p, m, stages_per_rank=v)
    num_stages = p * v
    schedule.validate(
        ordered_forward=range(num_stages), memory_limit=evaluate(find(name).memory, p, m, v)
    )
    number = st.integers(0, 9).map(float)
    stage_times = st.lists(number, min_size=num_stages, max_size=num_stages)
    f, i, w = data.draw(stage_times), data.draw(stage_times), data.draw(stage_times)
    comm = data.draw(number)
    timeline = schedule.simulate(Times(f, i, w, comm=comm))
    hops = sum(a != b for a, b in zip(schedule.placement[1:], schedule.placement, strict=False))
    one_microbatch = sum(f) + sum(i) + w[0] + 2 * hops * comm
    assert timeline.makespan >= max(one_microbatch, work(timeline))
    assert timeline.makespan >= timeline.longest_span >= work(timeline)


@given(shape=shapes())
@settings(max_examples=60, deadline=None)
def test_any_shape_is_lowered(shape):
    name, p, v, m = shape
    schedule = build(name, p, m, stages_per_rank=v)
    schedule.lower().validate()
    forward = schedule.forward_only()
    forward.validate(forward_only=True)
    forward.lower().validate(forward_only=True)


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("p", [16, 24, 33])
def test_building_blocks_of_many_ranks(name, p):
    schedule = build(name, p, 2 * p)
    timeline = schedule.simulate(UNIT)
    assert max(timeline.peak_activations) == evaluate(find(name).memory, p, 2 * p, 2)
    assert timeline.longest_span - 12 * p == evaluate(find(name).bubble, p, 2 * p, 2)
