"""Validation: each kind of fault is found and named, and nothing legal is refused."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Action, Memory, Schedule, build
from plait.core_ir.schedule.kinds import OVERLAP_F_B, B
from plait.core_ir.schedule.text import parse_action

SEEDS = st.integers(0, 2**32)


def schedule_of(*rows: str, placement=(0, 1), num_microbatches=2) -> Schedule:
    actions = [[parse_action(word) for word in row.split()] for row in rows]
    return Schedule.from_actions("hand-made", placement, num_microbatches, actions)


def rows_of(schedule: Schedule) -> list[list[Action]]:
    return [list(schedule.rank(rank)) for rank in range(schedule.num_ranks)]


def remade(schedule: Schedule, rows: list[list[Action]]) -> Schedule:
    return Schedule.from_actions("remade", schedule.placement, schedule.num_microbatches, rows)


FAULTS = {
    "missing forward": (
        ("0F0 0B0 0B1", "1F0 1B0 1F1 1B1"),
        r"0F1 is missing in schedule 'hand-made': rank 0, where stage 0 is placed, must run it once, before"
        r" rank 0, position 2: 0B1",
    ),
    "missing backward": (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), r"0I1 \(or 0B1\) is missing"),
    "missing weight gradient": (
        ("0F0 0F1 0I0 0W0 0I1", "1F0 1B0 1F1 1B1"),
        r"0W1 \(or 0B1\) is missing",
    ),
    "doubled": (
        ("0F0 0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 0: 0F0 does a task that rank 0, position 2: 0F0 does again",
    ),
    "doubled as part of B": (
        ("0F0 0F1 0B0 0B1 0W1", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 3: 0B1 does a task that rank 0, position 4: 0W1 does again",
    ),
    "misplaced": (
        ("0F0 0F1 0B0 0B1 1F0", "1B0 1F1 1B1"),
        r"rank 0, position 4: 1F0 is on the wrong rank: stage 1 is placed on rank 1",
    ),
    "backward before its forward": (
        ("0F0 0B0 0B1 0F1", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 2: 0B1 needs rank 0, position 3: 0F1, which comes later",
    ),
    "weight gradient before its input gradient": (
        ("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 2: 0W0 needs rank 0, position 3: 0I0, which comes later",
    ),
    "circle of waits": (
        ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        r"deadlocks: rank 0, position 1: 0B0 waits for rank 1, position 2: 1B0; rank 1, position 1:"
        r" 1F1 waits for rank 0, position 2: 0F1",
    ),
    "weight gradients out of order": (
        ("0F0 0F1 0I0 0I1 0W1 0W0", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 4: 0W1 comes before rank 0, position 5: 0W0; stage 0 must run these in"
        r" microbatch order",
    ),
    "backwards out of order": (
        ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"),
        r"rank 0, position 2: 0B1 comes before rank 0, position 3: 0B0",
    ),
    "two optimizer steps": (
        ("0F0 0F1 0B0 0B1 OPT OPT", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 5: OPT is a second optimizer step",
    ),
    "optimizer step too early": (
        ("0F0 0F1 0B0 OPT 0B1", "1F0 1B0 1F1 1B1"),
        r"rank 0, position 3: OPT comes before rank 0, position 4: 0B1",
    ),
}

LOWERED = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
)
MESSAGE_FAULTS = {
    "missing send": (("0SEND_F1", ""), r"0SEND_F1 is missing on rank 0"),
    "missing receive": (("1RECV_F1", ""), r"1RECV_F1 is missing on rank 1"),
    "doubled send": (
        ("0SEND_F1", "0SEND_F1 0SEND_F1"),
        r"rank 0, position 3: 0SEND_F1 stands more than once",
    ),
    "send before its producer": (
        ("0F1 0SEND_F1", "0SEND_F1 0F1"),
        r"rank 0, position 2: 0SEND_F1 comes before rank 0, position 3: 0F1, which it needs",
    ),
    "receive after its consumer": (
        ("1RECV_F0 1F0", "1F0 1RECV_F0"),
        r"rank 1, position 0: 1F0 comes before rank 1, position 1: 1RECV_F0, which it needs",
    ),
    "crossing messages": (
        ("0F1 0SEND_F1 0RECV_B0", "0F1 0RECV_B0 0SEND_F1"),
        r"messages of schedule 'hand-made' deadlock: rank 0, position 3: 0RECV_B0 waits for rank 1,"
        r" position 4: 1SEND_B0; rank 1, position 2: 1RECV_F1 waits for rank 0, position 4: 0SEND_F1",
    ),
    "unknown receive": (
        ("1SEND_B1", "1SEND_B1 1RECV_B0<0"),
        r"rank 1, position 8: 1RECV_B0<0 has no counterpart",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault):
    rows, message = FAULTS[fault]
    with pytest.raises(ScheduleError, match=message):
        schedule_of(*rows).validate()


@pytest.mark.parametrize("fault", MESSAGE_FAULTS)
def test_fault_of_messages_is_named(fault):
    (before, after), message = MESSAGE_FAULTS[fault]
    rows = [row.replace(before, after) for row in LOWERED]
    assert rows != list(LOWERED)
    with pytest.raises(ScheduleError, match=message):
        schedule_of(*rows).validate()


def test_lowered_schedule_without_fault():
    schedule_of(*LOWERED).validate()


def test_messages_that_no_edge_asks_for_are_errors():
    schedule = schedule_of(*LOWERED)
    with pytest.raises(
        ScheduleError, match="sends an gradient from stage 1 to stage 0, but no edge"
    ):
        schedule.validate(edges=[(0, 1, "activation")])
    rows = ["0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0"]
    one_rank = schedule_of(*rows, placement=(0, 0), num_microbatches=1)
    with pytest.raises(ScheduleError, match="both are on rank 0, where no message is needed"):
        one_rank.validate()


def test_edges_that_no_message_serves_are_errors():
    edges = [(0, 1, "activation"), (1, 0, "gradient"), (0, 2, "activation")]
    schedule = build("1f1b", 3, 2).lower()
    with pytest.raises(
        ScheduleError, match=r"0SEND_F0>2 is missing on rank 0|no edge of the program"
    ):
        schedule.validate(edges=[*edges, (1, 2, "activation"), (2, 1, "gradient")])


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ((0, 1, "weights"), "the kind must be 'activation' or 'gradient', got 'weights'"),
        ((0, 2, "activation"), "must join two of the 2 stages"),
        ((1, 1, "gradient"), "must join two of the 2 stages"),
    ],
)
def test_edges_that_do_not_exist_are_errors(edge, message):
    with pytest.raises(ScheduleError, match=message):
        build("1f1b", 2, 2).validate(edges=[edge])


def test_forward_order_matters_where_buffers_change():
    schedule = schedule_of("0F1 0F0 0B0 0B1", "1F1 1F0 1B0 1B1")
    schedule.validate()
    schedule.validate(ordered_forward=[])
    with pytest.raises(
        ScheduleError, match=r"rank 1, position 0: 1F1 comes before .* 1F0; stage 1"
    ):
        schedule.validate(ordered_forward=[1])


def test_memory_bound():
    schedule = build("1f1b", 4, 8)
    schedule.validate(memory=Memory(2.0), memory_limit=8.0)
    with pytest.raises(
        ScheduleError,
        match=r"rank 0, position 3: 0F3 makes rank 0 of schedule '1f1b' hold 8, over .* 7.5; it takes 8: give at",
    ):
        schedule.validate(memory=Memory(2.0), memory_limit=7.5)


def test_forward_only():
    forward = build("zb-h1", 2, 3).forward_only()
    forward.validate(forward_only=True)
    with pytest.raises(ScheduleError, match=r"0I0 \(or 0B0\) is missing"):
        forward.validate()
    with pytest.raises(ScheduleError, match=r"0I0 does not belong into a forward-only schedule"):
        build("zb-h1", 2, 3).validate(forward_only=True)


@given(seed=SEEDS, chain=st.booleans(), lowered=st.booleans())
@settings(max_examples=150, deadline=None)
def test_legal_schedules_pass(legal_case, seed, chain, lowered):
    schedule, edges = legal_case(seed, chain)
    if lowered:
        schedule = schedule.lower(edges)
    schedule.validate(edges=edges)
    if chain:
        schedule.validate()


@given(seed=SEEDS, lowered=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_dropped_doubled_or_moved_action_is_found(legal_case, seed, lowered):
    schedule, edges = legal_case(seed)
    if lowered:
        schedule = schedule.lower(edges)
    rng = random.Random(seed)
    rows = rows_of(schedule)
    row = rng.choice([row for row in rows if row])
    position = rng.randrange(len(row))
    change = rng.choice(["drop", "double", "move"])
    action = row[position] if change == "double" else row.pop(position)
    if change == "double":
        row.insert(rng.randint(0, len(row)), action)
    if change == "move":
        others = [other for other in rows if other is not row] or [rows.append([]) or rows[-1]]
        other = rng.choice(others)
        other.insert(rng.randint(0, len(other)), action)
    with pytest.raises(ScheduleError):
        remade(schedule, rows).validate(edges=edges)


def can_run(schedule: Schedule, edges) -> bool:
    """Run the ranks with plain sets; True if all actions run, weight gradients in order."""
    rows = rows_of(schedule)
    done: set[tuple[str, int, int]] = set()
    turn = [0] * schedule.num_stages
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row:
                needs, gives = set(), set()
                for part in row[0].parts:
                    stage, m = part.stage, part.microbatch
                    tasks = "IW" if part.kind is B else part.kind.name
                    gives |= {(task, stage, m) for task in tasks}
                    if "F" in tasks or "I" in tasks:
                        payload = "activation" if tasks == "F" else "gradient"
                        needs |= {
                            (tasks[0], e.source, m)
                            for e in edges
                            if e.target == stage and e.kind == payload
                        }
                    if "I" in tasks:
                        needs.add(("F", stage, m))
                    if tasks == "W":
                        needs.add(("I", stage, m))
                if not needs <= done:
                    break
                for task, stage, m in gives:
                    if task == "W":
                        if m != turn[stage]:
                            return False
                        turn[stage] += 1
                done |= gives
                row.pop(0)
                moved = True
    return not any(rows)


@given(seed=SEEDS, swaps=st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_reordered_schedules_pass_exactly_when_they_can_run(legal_case, seed, swaps):
    schedule, edges = legal_case(seed)
    rng = random.Random(seed)
    rows = rows_of(schedule)
    for _ in range(swaps):
        row = rng.choice([row for row in rows if row])
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        row[a], row[b] = row[b], row[a]
    changed = remade(schedule, rows)
    if can_run(changed, edges):
        changed.validate(edges=edges)
    else:
        with pytest.raises(ScheduleError):
            changed.validate(edges=edges)


def test_pairs_count_for_both_stages():
    schedule = schedule_of("0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1", placement=(0, 0))
    assert schedule.rank(0)[2].kind is OVERLAP_F_B
    schedule.validate()
    with pytest.raises(ScheduleError, match=r"OVERLAP_F_B does a task that .* 1B0 does again"):
        schedule_of("0F0 1F0 (0F1;1B0)OVERLAP_F_B 1B0 0B0 1F1 1B1 0B1", placement=(0, 0)).validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edges": [(0, 1)]}, r"an edge must be \(source stage, target .*, got \(0, 1\)"),
        ({"edges": [3]}, r"an edge must be \(source stage, .*, got 3"),
        ({"edges": 3}, "edges must be a sequence, got 3"),
        ({"edges": [(0, 1.0, "activation")]}, r"a stage must be an integer, got 1\.0"),
        ({"ordered_forward": [99]}, "names stage 99, but schedule '1f1b' has 2 stages"),
        ({"ordered_forward": ["0"]}, "a stage of ordered_forward must be an integer, got '0'"),
        ({"ordered_forward": 1}, "ordered_forward must be a sequence, got 1"),
        ({"memory": [1, 2]}, r"memory must be Memory, got \[1, 2\]"),
        ({"memory_limit": float("nan")}, "memory_limit must be a number or None, got nan"),
        ({"memory_limit": "3"}, "memory_limit must be a number or None, got '3'"),
    ],
)
def test_arguments_of_the_wrong_kind_are_errors(options, message):
    with pytest.raises(ScheduleError, match=message):
        build("1f1b", 2, 2).validate(**options)
