"""Messages that leave before their action ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Schedule, Times, build, parse_action, recipes
from plait.core_ir.schedule.durations import durations, left_behind


def test_a_gradient_leaves_between_i_and_w() -> None:
    schedule = build("1f1b", 2, 1)
    # 0F0 0-1, 1F0 1-2, 1B0 2-7; 0B0 from 7 on, or from 4, when I of 1B0 is done.
    assert schedule.simulate(Times(1, 2, 3)).makespan == 12
    early = schedule.simulate(Times(1, 2, 3, early=True))
    assert early.makespan == 9
    # Messages take 0.25 on the lane and 0.5 more: the activation arrives at 1.75, the gradient at 5.5.
    slow = schedule.simulate(Times(1, 2, 3, comm=0.5, transfer=0.25, early=True))
    assert {str(t.action): t.start for t in slow.tasks} == {
        "0F0": 0.0,
        "1F0": 1.75,
        "1B0": 2.75,
        "0B0": 5.5,
    }
    transfers = slow.transfers
    assert transfers is not None
    assert transfers.start.tolist() == [1.0, 4.75]
    assert transfers.arrival.tolist() == [1.75, 5.5]


def test_what_a_pair_leaves_behind() -> None:
    row = [parse_action(text) for text in ("0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2")]
    schedule = Schedule.from_actions("pair", [0], 3, [row])
    times = Times(1, 2, 3, fb=3, early=True)  # half of 1 + 2 + 3
    behind = left_behind(schedule, times, durations(schedule, times))
    assert behind[0].tolist() == [0, 0, 1.5, 0, 0]  # activations: before W
    assert behind[1].tolist() == [0, 0, 2.0, 3, 3]  # gradients: before F and W


def test_published_figures_assume_that_messages_leave_at_the_end() -> None:
    assert not Times(1, 1, 1).early
    with pytest.raises(ScheduleError, match=r"Times\.early must be"):
        Times(1, 1, 1, early=1)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([recipe.name for recipe in recipes() if not recipe.name.startswith("auto")]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_nothing_is_later_than_if_messages_waited(
    name: str, num_ranks: int, rounds: int, seed: int
) -> None:
    schedule = build(name, num_ranks, 2 * num_ranks * rounds)
    rng = np.random.default_rng(seed)
    f, i, w = rng.uniform(0.1, 2, size=(3, schedule.num_stages)).tolist()
    comm, transfer = rng.uniform(0, 1, size=2).tolist()
    waits = schedule.simulate(Times(f, i, w, comm=comm, transfer=transfer))
    early = schedule.simulate(Times(f, i, w, comm=comm, transfer=transfer, early=True))
    assert (early.start <= waits.start + 1e-9).all()
    # Not faster than one microbatch all the way, without the W that nobody waits for, nor than a rank's work.
    assert early.makespan >= sum(f) + sum(i) - 1e-9
    assert early.makespan >= (durations(schedule, Times(f, i, w)).sum() / num_ranks) - 1e-9
