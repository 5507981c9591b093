"""Text and CSV: printed and parsed back to the same, in torch.distributed.pipelining's spelling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError, TextError
from plait.core_ir.schedule import Action, Schedule, build
from plait.core_ir.schedule.kinds import (
    OPT,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    REDUCE_SHARED,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    B,
    F,
    I,
    W,
)
from plait.core_ir.schedule.text import parse_action

SPELLINGS = {
    "0F1": Action(F, 0, 1),
    "3I0": Action(I, 3, 0),
    "3W0": Action(W, 3, 0),
    "1B2": Action(B, 1, 2),
    "(0F1;3B0)OVERLAP_F_B": Action(OVERLAP_F_B, 0, 1, partner=Action(B, 3, 0)),
    "0SEND_F1": Action(SEND_F, 0, 1, peer=1),
    "1RECV_F0": Action(RECV_F, 1, 0, peer=0),
    "1SEND_B0": Action(SEND_B, 1, 0, peer=0),
    "0RECV_B12": Action(RECV_B, 0, 12, peer=1),
    "0SEND_F1>2": Action(SEND_F, 0, 1, peer=2),
    "2RECV_F1<0": Action(RECV_F, 2, 1, peer=0),
    "2UNSHARD": Action(UNSHARD, 2),
    "2RESHARD": Action(RESHARD, 2),
    "2REDUCE_GRAD": Action(REDUCE_GRAD, 2),
    "2REDUCE_SHARED": Action(REDUCE_SHARED, 2),
    "OPT": Action(OPT),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_spelling_of_actions(text):
    assert str(SPELLINGS[text]) == text
    assert parse_action(text) == SPELLINGS[text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0X1", "'0X1' is not an action: expected stage, kind and microbatch"),
        ("F1", "needs a stage"),
        ("0F", "needs a microbatch"),
        ("0OPT", "takes no stage"),
        ("0F1>2", "takes no peer stage"),
        ("0SEND_F1<2", "a send names its peer with '>'"),
        ("(0F1;3B0)", "is not an action"),
        ("(0F1;3I0)OVERLAP_F_B", "is not an action"),
        ("0F1 ", "is not an action"),
    ],
)
def test_what_is_no_action_is_an_error(text, message):
    with pytest.raises(TextError, match=message):
        parse_action(text)


@given(seed=st.integers(0, 2**32), lowered=st.booleans())
@settings(max_examples=60, deadline=None)
def test_text_round_trip(legal_case, seed, lowered):
    schedule, edges = legal_case(seed)
    if lowered:
        schedule = schedule.lower(edges)
    parsed = Schedule.from_text(str(schedule))
    assert parsed == schedule
    assert str(parsed) == str(schedule)


@given(seed=st.integers(0, 2**32), lowered=st.booleans())
@settings(max_examples=60, deadline=None)
def test_csv_round_trip(legal_case, tmp_path_factory, seed, lowered):
    schedule, edges = legal_case(seed)
    if lowered:
        schedule = schedule.lower(edges)
    path = tmp_path_factory.mktemp("csv") / "schedule.csv"
    schedule.to_csv(path)
    assert Schedule.from_csv(path) == schedule


def test_golden_text():
    assert str(build("1f1b", 2, 2)) == (
        "plait.schedule 1\n"
        "name 1f1b\n"
        "placement 0 1\n"
        "microbatches 2\n"
        "rank 0: 0F0 0F1 0B0 0B1\n"
        "rank 1: 1F0 1B0 1F1 1B1\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("plait.schedule 1", "plait.schedule 2"), "line 1, column 1: expected 'plait.schedule 1'"),
        (("placement 0 1", "placed 0 1"), "line 3, column 1: expected 'placement '"),
        (("placement 0 1", "placement 0 one"), "line 3: expected a number, got 'one'"),
        (("microbatches 2", "microbatches -2"), "line 4: expected a number, got '-2'"),
        (("rank 1:", "rank 2:"), "line 6, column 1: expected 'rank 1:'"),
        (("1F0 1B0", "1F0 1C0"), "line 6, column 13: '1C0' is not an action"),
    ],
)
def test_malformed_text_is_an_error_with_line_and_column(change, message):
    with pytest.raises(TextError, match=message):
        Schedule.from_text(str(build("1f1b", 2, 2)).replace(*change))


def test_golden_csv(tmp_path):
    path = tmp_path / "zero.csv"
    build("zb-h1", 2, 2).to_csv(path)
    assert path.read_bytes() == b"0F0,0F1,0I0,0W0,0I1,0W1\r\n1F0,1I0,1F1,1I1,1W0,1W1\r\n"
    assert Schedule.from_csv(path).name == "zero"


def test_idle_steps_of_a_csv_are_skipped(tmp_path):
    path = tmp_path / "idle.csv"
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0, 1F1 ,1B1,\n")
    schedule = Schedule.from_csv(path)
    schedule.validate()
    assert " ".join(map(str, schedule.rank(1))) == "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("0F0,0B0\n1F0,1Q0\n", TextError, r"bad\.csv, row 2, column 2: '1Q0' is not an action"),
        (
            "0F0\n0B0\n",
            ScheduleError,
            r"bad\.csv, row 2, column 1: 0B0 is on rank 1, but stage 0 .* rank 0",
        ),
        ("0F0,0F1,0B0\n", ScheduleError, r"bad\.csv, row 1, column 2: 0F1 has no backward"),
        ("0F0,0I0,0W0,0B1\n", ScheduleError, r"bad\.csv, row 1, column 4: 0B1 has no forward"),
        ("0F0,0B0,0F99,0B99\n", ScheduleError, r"row 1, column 3: 0F99 is of microbatch 99, but"),
        (
            "0F0,0B0\n2F0,2B0\n",
            ScheduleError,
            r"bad\.csv: no rank runs a task of stage 1, but one of stage 2",
        ),
        ("OPT\n", ScheduleError, r"bad\.csv: no schedule can be read: there is no task in it"),
        ("", ScheduleError, r"bad\.csv: no schedule can be read"),
    ],
)
def test_malformed_csv_is_an_error_with_its_place(tmp_path, content, error, message):
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(error, match=message):
        Schedule.from_csv(path)


def test_missing_csv_is_an_error(tmp_path):
    with pytest.raises(ScheduleError, match="no schedule can be read"):
        Schedule.from_csv(tmp_path / "none.csv")
