"""Microbatch size against number at a fixed global batch."""

import pytest

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Memory, Times
from plait.core_ir.schedule.sweep import sweep


def times_of(size: int, overhead: float) -> Times:
    return Times(overhead + size, overhead + size, overhead + size)


def test_a_small_overhead_favours_small_microbatches_and_a_large_one_large_ones():
    sizes = (1, 2, 4, 8)
    for overhead, best in ((0.0, 1), (2.0, 4)):
        rows = sweep("1f1b", 4, 32, {size: times_of(size, overhead) for size in sizes})
        assert [row.microbatch_size for row in rows] == list(sizes)
        assert [row.num_microbatches for row in rows] == [32, 16, 8, 4]
        for row in rows:
            # 1f1b: m + p - 1 times F + I + W.
            expected = (row.num_microbatches + 3) * 3 * (overhead + row.microbatch_size)
            assert row.timeline.makespan == expected
            assert row.samples_per_time == 32 / expected
        assert max(rows, key=lambda row: row.samples_per_time).microbatch_size == best


def test_sizes_without_a_schedule_say_why():
    times = {size: times_of(size, 0) for size in (1, 4)}
    few, many = reversed(sweep("dualpipev", 2, 8, times))
    assert few.timeline is None
    assert few.samples_per_time == 0
    assert "needs at least 4 microbatches, got 2" in few.why_not
    assert many.timeline is not None
    memory = {1: Memory(1.0), 4: Memory(4.0)}
    rows = sweep("1f1b", 2, 8, times, memory=memory, memory_limit=4)
    assert [row.timeline is None for row in rows] == [False, True]
    assert "over the memory limit of 4" in rows[1].why_not


def test_sizes_that_do_not_divide_the_batch_are_errors():
    with pytest.raises(ScheduleError, match="batch of 8 cannot be cut into microbatches of 3"):
        sweep("1f1b", 2, 8, {3: times_of(3, 0)})
