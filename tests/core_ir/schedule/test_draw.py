"""The terminal picture of a timeline."""

from plait.core_ir.schedule import Schedule, Times, build
from plait.core_ir.schedule.draw import draw
from plait.core_ir.schedule.text import parse_action


def test_golden_picture():
    assert build("1f1b", 2, 2).draw(Times(1, 1, 1)).splitlines() == [
        "rank 0  F0 F1 ......B0    ...B1",
        "rank 1  ...F0 B0    F1 B1    ......",
    ]


def test_golden_zero_bubble_picture():
    assert build("zb-h1", 2, 2).draw(Times(1, 1, 1, optimizer=1)).splitlines() == [
        "rank 0  F0  F1  ....I0  W0  I1  W1  OPT",
        "rank 1  ....F0  I0  F1  I1  W0  W1  OPT",
    ]


def test_stages_are_named_where_a_rank_has_several():
    rows = [[parse_action(word) for word in ("0F0", "1F0", "1B0", "0B0")]]
    picture = Schedule.from_actions("two", [0, 0], 1, rows).draw(Times(1, 1, 1))
    assert picture == "rank 0  0F0 1F0 1B0     0B0"


def test_long_timelines_are_squeezed():
    timeline = build("1f1b", 4, 60).simulate(Times(1, 1, 1))
    lines = draw(timeline, max_columns=80).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80 + len("rank 0  ")


def test_nothing_to_draw():
    assert draw(build("1f1b", 1, 1).simulate(Times(0, 0, 0))) == ""
