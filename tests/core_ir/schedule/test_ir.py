"""Actions, kinds and tables: what they hold, refuse and compare by."""

import copy
import pickle

import numpy as np
import pytest

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import KINDS, Action, Schedule, build
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import OPT, OVERLAP_F_B, SEND_F, UNSHARD, B, F, I, W

PAIR = Action(OVERLAP_F_B, 0, 1, partner=Action(B, 1, 0))


def test_kinds_are_numbered_by_their_place_and_named_once():
    assert [kind.code for kind in KINDS] == list(range(len(KINDS)))
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kinds_keep_their_identity(kind):
    assert copy.deepcopy(kind) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Action(F, 0), "a F action needs a microbatch, got None"),
        (lambda: Action(OPT, 0), "a OPT action takes no stage, got 0"),
        (lambda: Action(UNSHARD, 0, 1), "a UNSHARD action takes no microbatch, got 1"),
        (lambda: Action(SEND_F, 0, 1), "a SEND_F action needs a peer stage, got None"),
        (lambda: Action(F, 0, 1, peer=1), "a F action takes no peer stage, got 1"),
        (lambda: Action(OVERLAP_F_B, 0, 1), "a OVERLAP_F_B action needs a partner"),
        (
            lambda: Action(OVERLAP_F_B, 0, 1, partner=Action(I, 1, 0)),
            "the partner of OVERLAP_F_B must be a B action, got 1I0",
        ),
    ],
)
def test_malformed_actions_are_errors(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_parts_of_a_pair_and_of_others():
    assert PAIR.parts == (Action(F, 0, 1), Action(B, 1, 0))
    assert Action(W, 2, 3).parts == (Action(W, 2, 3),)


def test_rank_gives_back_what_the_table_was_made_of():
    rows = [
        [Action(F, 0, 0), Action(SEND_F, 0, 0, peer=2), PAIR, Action(OPT)],
        [],
        [Action(UNSHARD, 2), Action(F, 2, 1)],
    ]
    table = Schedule.from_actions("mixed", [0, 0, 2], 2, rows)
    assert [list(table.rank(rank)) for rank in range(3)] == rows
    assert (table.num_ranks, table.num_stages, table.num_actions) == (3, 3, 6)
    assert table.rank_of_action.tolist() == [0, 0, 0, 0, 2, 2]
    with pytest.raises(ScheduleError, match="rank 3 is not one of the 3 ranks"):
        table.rank(3)


def test_tables_are_read_only_and_take_no_part_in_the_callers_arrays():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match="read-only"):
        schedule.stage[0] = 1
    kind = np.array([F.code])
    table = ActionTable("one", (0,), 1, 1, [0, 1], kind, [0], [0], [-1], [-1])
    kind[0] = B.code
    assert table.action(0) == Action(F, 0, 0)


def test_equality_is_by_actions_and_placement():
    schedule = build("1f1b", 2, 3)
    rows = [schedule.rank(rank) for rank in range(2)]
    same = Schedule.from_actions("another name", [0, 1], 3, rows)
    assert same == schedule
    assert hash(same) == hash(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule != build("gpipe", 2, 3)
    assert schedule != Schedule.from_actions("1f1b", [0, 1], 4, rows)
    assert schedule != "1f1b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), 1, [[]]), "at least one rank, stage and microbatch"),
        (((0,), 0, [[]]), "at least one rank, stage and microbatch"),
        (((1,), 1, [[]]), "stage 0 is placed on rank 1"),
        (((0,), 1, [[Action(F, 1, 0)]]), "rank 0, position 0: 1F0 is outside the 1 stages"),
        (((0,), 1, [[Action(F, 0, 1)]]), "rank 0, position 0: 0F1 is outside the 1 microbatches"),
        (
            ((0,), 2, [[Action(F, 0, 0), PAIR]]),
            r"rank 0, position 1: \(0F1;1B0\)OVERLAP_F_B is outside the 1 stages",
        ),
    ],
)
def test_tables_that_do_not_fit_are_errors(arguments, message):
    placement, num_microbatches, rows = arguments
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_actions("wrong", placement, num_microbatches, rows)


def test_arrays_that_do_not_fit_each_other_are_errors():
    with pytest.raises(ScheduleError, match="do not fit each other"):
        ActionTable("short", (0,), 1, 1, [0, 2], [0], [0], [0], [-1], [-1])
    with pytest.raises(ScheduleError, match="unknown kind codes"):
        ActionTable("kind", (0,), 1, 1, [0, 1], [len(KINDS)], [0], [0], [-1], [-1])
