"""The terminal picture of a timeline."""

import re

from plait.core_ir.schedule import Schedule, Times, build
from plait.core_ir.schedule.draw import draw, draw_spans
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
    *rows, note = draw(timeline, max_columns=80).splitlines()
    assert len(rows) == 4
    assert max(map(len, rows)) <= 80
    drawn = sum(len(re.findall("[FB]+", row)) for row in rows)
    assert 0 < drawn < 480
    assert re.fullmatch(r"too narrow for \d+ of 480 tasks", note)


def test_a_label_that_does_not_fit_is_never_cut():
    timeline = build("1f1b", 2, 11).simulate(Times(1, 1, 1))  # 36 long
    *_, row = draw(timeline, max_columns=8 + 36).splitlines()
    assert row == "rank 1  .FB FB FB FB FB FB FB FB FB FB FB .."
    *_, row = draw(timeline, max_columns=8 + 3 * 36).splitlines()
    assert row.startswith("rank 1  ...F0 B0    F1 B1    ")
    assert row.endswith("F9 B9    F  B10   ......")


def test_stages_give_way_before_microbatches():
    rows = [[parse_action(word) for word in ("0F0", "1F0", "1B0", "0B0")]]
    timeline = Schedule.from_actions("two", [0, 0], 1, rows).simulate(Times(1, 1, 1))
    assert draw(timeline, max_columns=8 + 3 * 6) == "rank 0  F0 F0 1B0   0B0"
    assert draw(timeline, max_columns=8 + 6) == "rank 0  FFB B"


def test_colors_keep_labels_apart_where_there_is_no_blank():
    """Beside one of its own colour a label needs a blank, or 10 11 would be read as 1011."""
    timeline = build("zb-h1", 1, 12).simulate(Times(1, 1, 1))
    (row,) = draw_spans(timeline, max_columns=8 + 2 * 36)
    assert [span.text for span in row[-8:]] == ["9 ", "9 ", "10", "10", "10", "11", "11", "11"]
    timeline = build("gpipe", 1, 12).simulate(Times(1, 1, 1))
    (row,) = draw_spans(timeline, max_columns=8 + 2 * 36)
    assert [span.text for span in row[1:13]] == [*(f"{m} " for m in range(10)), "  ", "  "]


def test_nothing_to_draw():
    assert draw(build("1f1b", 1, 1).simulate(Times(0, 0, 0))) == (
        "nothing to draw: no task takes any time"
    )
