"""Text and CSV: printed and parsed back to the same, in torch.distributed.pipelining's spelling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError, TextError, UsageError
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
        ("\u0660F\u0661", "is not an action"),
        ("0F" + "1" * 5000, "is not an action"),
        ("0F4294967296", "the microbatch of a F action must be 2147483647 or less"),
        ("(0F4294967296;1B0)OVERLAP_F_B", "the microbatch of a OVERLAP_F_B action must be"),
    ],
)
def test_what_is_no_action_is_an_error(text, message):
    with pytest.raises(TextError, match=message):
        parse_action(text)


@pytest.mark.parametrize("read", [parse_action, Schedule.from_text, Schedule.from_csv])
def test_what_is_no_text_is_an_error(read):
    with pytest.raises(ScheduleError, match=r"must be a .*, got None"):
        read(None)


def test_actions_as_text():
    rows = [["0F0", parse_action("0B0")], []]
    assert Schedule.from_actions("x", [0], 1, rows).rank(0) == tuple(
        map(parse_action, ("0F0", "0B0"))
    )
    with pytest.raises(TextError, match="'0F' is not an action"):
        Schedule.from_actions("x", [0], 1, [["0F"]])
    with pytest.raises(ScheduleError, match=r"must be one line, got 'a\\nb'"):
        Schedule.from_actions("a\nb", [0], 1, [[]])
    with pytest.raises(ScheduleError, match="an entry of a schedule must be an Action, got 3"):
        Schedule.from_actions("x", [0], 1, [[3]])


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
        (("microbatches 2", "microbatches \u0662"), "line 4: expected a number"),
        (("rank 1:", "rank 2:"), "line 6, column 1: expected 'rank 1:'"),
        (("1F0 1B0", "1F0 1C0"), "line 6, column 13: '1C0' is not an action"),
    ],
)
def test_malformed_text_is_an_error_with_line_and_column(change, message):
    with pytest.raises(TextError, match=message):
        Schedule.from_text(str(build("1f1b", 2, 2)).replace(*change))


def test_text_of_too_many_tasks_is_an_error():
    text = str(build("1f1b", 2, 2))
    for number, message in (("99999999", "has at most"), ("99999999999", "2147483647 or less")):
        with pytest.raises(ScheduleError, match=message):
            Schedule.from_text(text.replace("microbatches 2", f"microbatches {number}"))


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


def test_a_mark_at_the_begin_and_blank_lines_at_the_end_are_skipped(tmp_path):
    path = tmp_path / "marked.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n\r\n\n")
    assert Schedule.from_csv(path) == build("1f1b", 2, 1)


def test_a_rank_that_runs_nothing_has_an_empty_cell(tmp_path):
    path = tmp_path / "idle.csv"
    schedule = Schedule.from_actions("idle", [1], 1, [[], ["0F0", "0B0"], []])
    schedule.to_csv(path)
    assert path.read_bytes() == b'""\r\n0F0,0B0\r\n""\r\n'
    assert Schedule.from_csv(path) == schedule


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
        (
            "0B0\n1B0\n",
            ScheduleError,
            r"row 1, column 1: 0B0 has no forward: .* microbatches none,",
        ),
        ("0F0,,0F1,0B0,0B0\n", ScheduleError, r"row 1, column 5: 0B0 is done in column 4 already"),
        ("0F0,0B0\n\n1F0,1B0\n", ScheduleError, r"bad\.csv, row 2 is blank; a rank that runs"),
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


def test_errors_of_a_csv_that_is_validated_name_row_and_column(tmp_path):
    path = tmp_path / "late.csv"
    path.write_text("0F0,,0B0\n,1B0,,1F0\n")
    schedule = Schedule.from_csv(path)
    place = r"late\.csv, row 2, column 2: 1B0 needs .*late\.csv, row 2, column 4: 1F0, which"
    with pytest.raises(ScheduleError, match=place):
        schedule.validate()
    path.write_text("0F0,,0SEND_F0,0RECV_B0,OPT,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    with pytest.raises(
        ScheduleError, match=r"late\.csv, row 1, column 5: OPT comes before .* column 6"
    ):
        Schedule.from_csv(path).validate()


@pytest.mark.parametrize(
    ("content", "hinted"),
    [("0F1,0F2,0B0,0B1", True), ("0F0,0F1,0B0", False), ("0F1,0F2,0B1", False)],
)
def test_the_hint_at_torchs_1f1b_is_given_where_it_fits(tmp_path, content, hinted):
    path = tmp_path / "bad.csv"
    path.write_text(f"{content}\n")
    with pytest.raises(ScheduleError, match="has no") as caught:
        Schedule.from_csv(path)
    assert ("Schedule1F1B" in str(caught.value)) is hinted


def test_a_csv_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="cannot write"):
        build("1f1b", 2, 2).to_csv(tmp_path)


def test_missing_csv_is_an_error(tmp_path):
    with pytest.raises(ScheduleError, match="no schedule can be read"):
        Schedule.from_csv(tmp_path / "none.csv")
