"""Rows are shared only by values that are not alive together, and are as few as can be."""

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.jax.spmd.slots import colour

INTERVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


@given(INTERVALS)
def test_rows_are_apart_and_as_few_as_are_alive_at_once(intervals: list[tuple[int, int]]) -> None:
    rows, num_rows = colour(dict(enumerate(intervals)))
    for a, (birth_a, death_a) in enumerate(intervals):
        for b, (birth_b, death_b) in enumerate(intervals):
            if a != b and rows[a] == rows[b]:
                assert death_a <= birth_b or death_b <= birth_a
    times = {birth for birth, _ in intervals}
    most = max((sum(b <= t < d for b, d in intervals) for t in times), default=0)
    lasting = [interval for interval in intervals if interval[0] < interval[1]]
    assert num_rows == most if len(lasting) == len(intervals) else num_rows >= most
    assert set(rows.values()) == set(range(num_rows))
