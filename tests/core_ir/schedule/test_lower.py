"""Lowering: every message there, in place, and no deadlock on the strictest and on laxer runtimes."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Action, Edge, Schedule, build
from plait.core_ir.schedule.kinds import (
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    B,
    F,
    I,
)
from plait.core_ir.schedule.rewrite import add_reductions

SEEDS = st.integers(0, 2**32)


def message_key(action: Action) -> tuple[str, int, int, int]:
    """What a send and its receive have in common."""
    payload = action.kind.payload
    if action.kind.direction == "send":
        return (payload, action.stage, action.peer, action.microbatch)
    return (payload, action.peer, action.stage, action.microbatch)


def blocking_run_ends(rows: list[tuple[Action, ...]]) -> bool:
    """Every rank runs one action at a time; a message needs both ranks at it at the same moment."""
    queues = [deque(row) for row in rows]
    while True:
        moved = False
        heads: dict[tuple, list[int]] = {}
        for rank, queue in enumerate(queues):
            while queue and not queue[0].kind.is_message:
                queue.popleft()
                moved = True
            if queue:
                heads.setdefault(message_key(queue[0]), []).append(rank)
        for ranks in heads.values():
            if len(ranks) == 2:
                moved = True
                for rank in ranks:
                    queues[rank].popleft()
        if not moved:
            return not any(queues)


def posting_run_ends(schedule: Schedule, edges: tuple[Edge, ...]) -> bool:
    """Messages are posted and tasks wait for theirs; two ranks share one channel, served in order."""
    rows = [deque(schedule.rank(r)) for r in range(schedule.num_ranks)]
    channels: dict[tuple[int, int], deque[tuple]] = {}
    arrived: set[tuple] = set()

    def needed(action: Action) -> set[tuple]:
        keys = set()
        for part in action.parts:
            payload = {F: "activation", B: "gradient", I: "gradient"}.get(part.kind)
            keys |= {
                (payload, e.source, e.target, part.microbatch)
                for e in edges
                if e.kind == payload
                and e.target == part.stage
                and schedule.placement[e.source] != schedule.placement[e.target]
            }
        return keys

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row and (row[0].kind.is_message or needed(row[0]) <= arrived):
                action = row.popleft()
                moved = True
                if action.kind.is_message:
                    peer = schedule.placement[action.peer]
                    channels.setdefault((rank, peer), deque()).append(message_key(action))
        for (rank, peer), posts in channels.items():
            other = channels.get((peer, rank), deque())
            while posts and other and posts[0] == other[0]:
                arrived.add(posts.popleft())
                other.popleft()
                moved = True
    return not any(rows) and not any(channels.values())


def rows_of(schedule: Schedule) -> list[tuple[Action, ...]]:
    return [schedule.rank(rank) for rank in range(schedule.num_ranks)]


@given(seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_no_legal_schedule_deadlocks(legal_case, seed):
    schedule, edges = legal_case(seed)
    lowered = schedule.lower(edges)
    assert blocking_run_ends(rows_of(lowered))
    assert posting_run_ends(lowered, edges)
    lowered.validate(edges=edges)


@given(seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_one_message_per_microbatch_and_edge_between_ranks(legal_case, seed):
    schedule, edges = legal_case(seed)
    lowered = schedule.lower(edges)
    expected = sorted(
        (e.kind, e.source, e.target, microbatch)
        for e in edges
        for microbatch in range(schedule.num_microbatches)
        if schedule.placement[e.source] != schedule.placement[e.target]
    )
    for direction in ("send", "receive"):
        found = [
            (message_key(action), rank)
            for rank, row in enumerate(rows_of(lowered))
            for action in row
            if action.kind.direction == direction
        ]
        assert sorted(key for key, _ in found) == expected
        assert all(
            rank == schedule.placement[key[1 + (direction == "receive")]] for key, rank in found
        )


@given(seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_sends_leave_before_the_next_task_and_tasks_keep_their_order(legal_case, seed):
    schedule, edges = legal_case(seed)
    lowered = schedule.lower(edges)
    for rank, row in enumerate(rows_of(lowered)):
        assert tuple(a for a in row if not a.kind.is_message) == schedule.rank(rank)
        last_task: Action | None = None
        for action in row:
            if not action.kind.is_message:
                last_task = action
            elif action.kind.direction == "send":
                kinds = {SEND_F: {F}, SEND_B: {B, I}}[action.kind]
                assert any(
                    part.kind in kinds
                    and (part.stage, part.microbatch) == (action.stage, action.microbatch)
                    for part in last_task.parts
                ), (action, last_task)


@given(seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_receives_stand_before_their_consumer(legal_case, seed):
    schedule, edges = legal_case(seed)
    for row in rows_of(schedule.lower(edges)):
        seen: set[tuple] = set()
        for action in row:
            for part in action.parts:
                if part.kind in (F, B, I):
                    seen.add((part.kind is F, part.stage, part.microbatch))
            if action.kind.direction == "receive":
                key = (action.kind is RECV_F, action.stage, action.microbatch)
                assert key not in seen, action


def test_lowering_twice_changes_nothing():
    lowered = build("zb-h1", 4, 6).lower()
    assert lowered.lower() == lowered


def test_golden_two_ranks():
    lowered = build("1f1b", 2, 2).lower()
    assert [" ".join(map(str, row)) for row in rows_of(lowered)] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_skip_connection_is_a_message_of_its_own():
    edges = [(0, 1, "activation"), (1, 2, "activation"), (0, 2, "activation")]
    lowered = build("gpipe", 3, 1).lower(edges)
    lowered.validate(edges=edges)
    assert {"0SEND_F0", "0SEND_F0>2"} <= set(map(str, lowered.rank(0)))
    assert {"2RECV_F0", "2RECV_F0<0"} <= set(map(str, lowered.rank(2)))
    assert not any(a.kind in (SEND_B, RECV_B) for row in rows_of(lowered) for a in row)


def test_neighbours_on_one_rank_need_no_message():
    rows = [[Action(k, s, 0) for k, s in ((F, 0), (F, 1), (B, 1), (B, 0))]]
    schedule = Schedule.from_actions("one rank", [0, 0], 1, rows)
    assert schedule.lower() == schedule


def test_forward_only_has_no_gradient_messages():
    lowered = build("1f1b", 3, 4).forward_only().lower()
    lowered.validate(forward_only=True)
    assert {a.kind for row in rows_of(lowered) for a in row} == {F, SEND_F, RECV_F}


def test_schedule_that_cannot_run_is_refused():
    rows = [[Action(B, 0, 0), Action(F, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]]
    with pytest.raises(
        ScheduleError, match=r"rank 0, position 0: 0B0 needs rank 0, position 1: 0F0"
    ):
        Schedule.from_actions("wrong", [0, 1], 1, rows).lower()


def test_the_oracles_see_a_deadlock():
    crossed = [
        [Action(F, 0, 0), Action(RECV_B, 0, 0, peer=1), Action(SEND_F, 0, 0, peer=1)],
        [Action(RECV_F, 1, 0, peer=0), Action(F, 1, 0), Action(SEND_B, 1, 0, peer=0)],
    ]
    schedule = Schedule.from_actions("crossed", [0, 1], 1, crossed)
    edges = (Edge(0, 1, "activation"), Edge(1, 0, "gradient"))
    assert not blocking_run_ends(rows_of(schedule))
    assert not posting_run_ends(schedule, edges)


def test_gradients_are_reduced_behind_the_last_weight_gradient_of_a_stage() -> None:
    for name in ("1f1b", "zb-h1", "zbv", "dualpipev", "gpipe"):
        schedule = build(name, 2, 4)
        reduced = add_reductions(schedule.lower())
        assert [a for r in (0, 1) for a in reduced.rank(r) if a.kind is not REDUCE_GRAD] == [
            a for r in (0, 1) for a in schedule.lower().rank(r)
        ]
        for rank in (0, 1):
            row = reduced.rank(rank)
            stages = [s for s, placed in enumerate(schedule.placement) if placed == rank]
            assert sorted(a.stage for a in row if a.kind is REDUCE_GRAD) == stages
            for at, action in enumerate(row):
                if action.kind is REDUCE_GRAD:
                    before = row[at - 1].parts[-1]
                    assert (before.stage, before.microbatch) == (action.stage, 3)
                    assert before.kind.weight_gradient
                    later = [part for a in row[at:] for part in a.parts]
                    assert not any(
                        p.stage == action.stage and p.kind.weight_gradient for p in later
                    )
