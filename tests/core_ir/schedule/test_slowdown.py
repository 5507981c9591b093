"""Computing that is slower while its rank sends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Times, build
from plait.core_ir.schedule import timing as timing_module
from plait.core_ir.schedule.durations import durations


def test_a_step_by_hand():
    timeline = build("gpipe", 2, 3).simulate(Times(1, 1, 1, transfer=0.5, slowdown=2))
    # The first F sends half a second, in which a quarter of the second F is done; so does the second; then I and W of
    # rank 1, whose sends slow it in the same way.
    first = timeline.rank == 0
    assert timeline.start[first].tolist()[:3] == [0, 1, 2.25]
    assert timeline.end[first].tolist()[:3] == [1, 2.25, 3.5]
    assert timeline.transfers.start.tolist()[:3] == [1, 2.25, 3.5]
    last = timeline.rank == 1
    assert timeline.start[last].tolist() == [1.5, 2.75, 4, 5, 7, 9.25]
    assert timeline.end[last].tolist() == [2.5, 3.75, 5, 7, 9.25, 11.5]


def test_all_of_an_action_may_be_slow():
    timeline = build("gpipe", 2, 2).simulate(Times(1, 1, 1, transfer=9, slowdown=2))
    assert timeline.end[timeline.rank == 0].tolist()[:2] == [1, 3]


def test_nothing_sent_slows_nothing():
    schedule = build("zbv", 4, 8)
    for times in ({"comm": 1.0}, {"transfer": 0.0}):
        plain = schedule.simulate(Times(2, 1, 1, **times))
        slow = schedule.simulate(Times(2, 1, 1, **times, slowdown=3))
        assert np.array_equal(plain.start, slow.start)
        assert np.array_equal(plain.end, slow.end)


@given(seed=st.integers(0, 2**32), data=st.data(), many=st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_action_does_its_work_in_its_time(legal_case, seed, data, many):
    """Times are right if every action starts as early as it can and, slow while its rank's lane is occupied, does its
    work exactly: only one timeline is."""
    schedule, edges = legal_case(seed)
    number = st.integers(0, 9).map(float)
    f, i, w = (
        data.draw(st.lists(number, min_size=schedule.num_stages, max_size=schedule.num_stages))
        for _ in range(3)
    )
    comm = {(e.source, e.target): data.draw(number) for e in edges}
    transfer = {(e.source, e.target): data.draw(number) for e in edges}
    slowdown = data.draw(st.sampled_from([1.0, 1.25, 2.0, 5.0]))
    times = Times(f, i, w, comm=comm, transfer=transfer, slowdown=slowdown)
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr(timing_module, "_MANY_LANES", 1)
        timeline = schedule.simulate(times, edges=edges)
    moved = timeline.transfers
    work = durations(timeline.schedule, times)
    sender = timeline.rank[moved.producer]
    for action, (rank, start, end) in enumerate(
        zip(timeline.rank, timeline.start, timeline.end, strict=True)
    ):
        own = sender == rank
        overlap = np.minimum(end, moved.end[own]) - np.maximum(start, moved.start[own])
        busy = np.maximum(overlap, 0).sum()
        assert end - start - busy * (1 - 1 / slowdown) == pytest.approx(work[action], abs=1e-9)
        arrivals = moved.arrival[moved.consumer == action]
        before = timeline.end[action - 1] if action and timeline.rank[action - 1] == rank else 0.0
        earliest = max([before, *arrivals])
        assert start >= earliest - 1e-9
        # What it waits for without a message: parts of its own stage on other ranks do not exist here.
        assert start == pytest.approx(earliest, abs=1e-9)


def test_a_slowdown_is_one_number_of_one_or_more():
    for wrong in (0.5, [1.0, 2.0], float("nan")):
        with pytest.raises(ScheduleError, match=r"Times\.slowdown must be"):
            Times(1, 1, 1, slowdown=wrong)
