"""The communication lane, what the optimizer step waits for, and memory over time."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Edge, Memory, Schedule, Times, build
from plait.core_ir.schedule import timing as timing_module
from plait.core_ir.schedule.kinds import OPT, B

SEEDS = st.integers(0, 2**32)
UNIT = Times(1, 1, 1)


def sent_in_order(lowered: Schedule):
    """What each rank of a lowered schedule sends: (edge, microbatch), one after the other."""
    rows = [lowered.rank(rank) for rank in range(lowered.num_ranks)]
    return [
        [
            (Edge(action.stage, action.peer, action.kind.payload), action.microbatch)
            for action in row
            if action.kind.direction == "send"
        ]
        for row in rows
    ]


def relax_two_lanes(schedule: Schedule, edges, f, i, w, comm, transfer):
    """Start of each action and message, by raising starts until every wait is kept."""
    rows = [schedule.rank(r) for r in range(schedule.num_ranks)]
    length, does = {}, {}
    for row in rows:
        for action in row:
            parts = [(p, "IW" if p.kind is B else p.kind.name) for p in action.parts]
            of = {"F": f, "I": i, "W": w}
            length[action] = sum(of[task][p.stage] for p, tasks in parts for task in tasks)
            for part, tasks in parts:
                for task in tasks:
                    does[task, part.stage, part.microbatch] = action
    waits = [(b, a, 0.0) for row in rows for a, b in itertools.pairwise(row)]
    lanes = sent_in_order(schedule.lower(edges))
    for edge in edges:
        source, target, payload = edge
        task = "F" if payload == "activation" else "I"
        for m in range(schedule.num_microbatches):
            producer, consumer = does[task, source, m], does[task, target, m]
            if schedule.placement[source] == schedule.placement[target]:
                waits.append((consumer, producer, 0.0))
                continue
            message = (edge, m)
            length[message] = transfer[source, target]
            waits.append((message, producer, 0.0))
            waits.append((consumer, message, comm[source, target]))
    for lane in lanes:
        waits += [(b, a, 0.0) for a, b in itertools.pairwise(lane)]
    start = dict.fromkeys(length, 0.0)
    changed = True
    while changed:
        changed = False
        for later, earlier, latency in waits:
            bound = start[earlier] + length[earlier] + latency
            if start[later] < bound:
                start[later], changed = bound, True
    return start, length


@given(seed=SEEDS, data=st.data(), many=st.booleans())
@settings(max_examples=100, deadline=None)
def test_two_lanes_equal_the_oracle(legal_case, seed, data, many):
    schedule, edges = legal_case(seed)
    number = st.integers(0, 9).map(float)
    f, i, w = (
        data.draw(st.lists(number, min_size=schedule.num_stages, max_size=schedule.num_stages))
        for _ in range(3)
    )
    comm = {(e.source, e.target): data.draw(number) for e in edges}
    transfer = {(e.source, e.target): data.draw(number) for e in edges}
    start, length = relax_two_lanes(schedule, edges, f, i, w, comm, transfer)
    with pytest.MonkeyPatch.context() as patch:
        if many:
            patch.setattr(timing_module, "_MANY_LANES", 1)
        timeline = schedule.simulate(Times(f, i, w, comm=comm, transfer=transfer), edges=edges)
    for task in timeline.tasks:
        assert (task.start, task.end) == (
            start[task.action],
            start[task.action] + length[task.action],
        )
    moved = timeline.transfers
    for k in range(moved.num_messages):
        edge = moved.edges[moved.edge[k]]
        producer = schedule.action(moved.producer[k])
        done = "F" if edge.kind == "activation" else "BI"
        (microbatch,) = (
            part.microbatch
            for part in producer.parts
            if part.kind.name in done and part.stage == edge.source
        )
        begin = start[edge, microbatch]
        assert (moved.start[k], moved.end[k]) == (begin, begin + transfer[edge.source, edge.target])
        assert moved.arrival[k] == moved.end[k] + comm[edge.source, edge.target]
        consumer = schedule.action(moved.consumer[k])
        assert edge.target in {part.stage for part in consumer.parts}


@given(name=st.sampled_from(["1f1b", "interleaved-1f1b", "zbv", "dualpipev"]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_lowering_changes_no_time(name, data):
    schedule = build(name, data.draw(st.integers(2, 4)), 8)
    number = st.floats(0.1, 9)
    f, i, w = (
        data.draw(st.lists(number, min_size=schedule.num_stages, max_size=schedule.num_stages))
        for _ in range(3)
    )
    pairs = [(s, t) for s in range(schedule.num_stages) for t in (s - 1, s + 1)]
    transfer, comm = ({pair: data.draw(number) for pair in pairs} for _ in range(2))
    times = Times(f, i, w, transfer=transfer, comm=comm)
    lowered = schedule.lower()
    plain, after = schedule.simulate(times), lowered.simulate(times)
    assert np.array_equal(plain.start, after.start)
    # The lane of each rank sends in the order of the lowered schedule's sends.
    sent = plain.transfers
    lanes = [[] for _ in range(schedule.num_ranks)]
    for producer, index in zip(sent.producer, sent.edge, strict=True):
        edge = sent.edges[index]
        parts = schedule.action(producer).parts
        part = parts[0] if edge.kind == "activation" else parts[-1]
        lanes[plain.rank[producer]].append((edge, part.microbatch))
    assert lanes == sent_in_order(lowered)


def test_messages_of_one_rank_wait_for_each_other():
    schedule = build("gpipe", 2, 3)
    timeline = schedule.simulate(Times(1, 1, 1, comm=0.5, transfer=3))
    sent = timeline.transfers
    assert sent.start.tolist() == [1.0, 4.0, 7.0, 13.5, 16.5, 19.5]
    assert sent.arrival.tolist() == [4.5, 7.5, 10.5, 17.0, 20.0, 23.0]
    assert timeline.start[timeline.rank == 1].tolist()[:3] == [4.5, 7.5, 10.5]


def test_one_number_and_one_per_edge_are_the_same():
    schedule = build("zbv", 3, 6)
    edges = [(s, t) for s in range(6) for t in (s - 1, s + 1)]
    one = schedule.simulate(Times(1, 1, 1, comm=2, transfer=1))
    each = Times(1, 1, 1, comm=dict.fromkeys(edges, 2), transfer=dict.fromkeys(edges, 1))
    assert np.array_equal(one.start, schedule.simulate(each).start)


def test_an_edge_without_its_number_is_an_error():
    with pytest.raises(ScheduleError, match=r"Times\.comm has no entry \(1, 0\), but stage 1 send"):
        build("1f1b", 2, 2).simulate(Times(1, 1, 1, comm={(0, 1): 1}))
    with pytest.raises(ScheduleError, match=r"Times\.transfer must be a number or one per edge"):
        Times(1, 1, 1, transfer={(0, 1): -1})


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zbv"])
def test_a_barrier_costs_the_shape_and_validating_afterwards_keeps_it(name):
    schedule = build(name, 4, 16)
    times = Times(1, 1, 1, optimizer=1)
    alone, barrier, after = (
        schedule.simulate(times, sync=sync) for sync in ("none", "barrier", "post_validate")
    )
    last_task = alone.end[alone.schedule.kind != OPT.code].max()
    steps = barrier.schedule.kind == OPT.code
    assert (barrier.start[steps] == last_task).all()
    assert barrier.step_time == barrier.makespan
    assert after.step_time == alone.step_time <= barrier.step_time
    work = 3 * 16 * schedule.num_stages / 4 + schedule.num_stages / 4
    if name == "zb-h2":
        assert after.step_time == work
        assert barrier.step_time == work + 3
    if name == "1f1b":
        assert after.step_time == barrier.step_time


def test_the_validated_state_runs_through_the_ranks():
    # Rank 0 ends last here, so that all ranks behind it wait for what it passes on.
    timeline = build("1f1b", 3, 4).simulate(
        Times(1, 1, 1, comm=0.25, optimizer=2), sync="post_validate"
    )
    steps = timeline.schedule.kind == OPT.code
    last = timeline.end[~steps].max()
    assert timeline.start[steps].tolist() == [last, last + 0.25, last + 0.5]


def test_a_sync_shows_steps_that_take_no_time():
    timeline = build("1f1b", 2, 2).simulate(UNIT, sync="barrier")
    assert (timeline.schedule.kind == OPT.code).sum() == 2
    with pytest.raises(ScheduleError, match="sync must be one of none, barrier, post_validate"):
        build("1f1b", 2, 2).simulate(UNIT, sync="later")


def test_parameters_are_held_all_the_time():
    memory = Memory(1.0, parameters=[10, 20, 30, 40])
    timeline = build("zbv", 2, 4).simulate(UNIT, memory)
    plain = build("zbv", 2, 4).simulate(UNIT).peak_memory
    assert timeline.peak_memory.tolist() == (plain + 50).tolist()
    assert timeline.peak_activations.tolist() == plain.tolist()
    with pytest.raises(ScheduleError, match="over the memory limit of 53; it takes 54"):
        build("zbv", 2, 4, memory=memory, memory_limit=53)


@given(seed=SEEDS, data=st.data())
@settings(max_examples=30, deadline=None)
def test_memory_over_time(legal_case, seed, data):
    schedule, edges = legal_case(seed)
    amounts = st.lists(
        st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages
    )
    activation = data.draw(amounts)
    handover = [data.draw(st.integers(0, a)) for a in activation]
    memory = Memory(activation, handover, parameters=3)
    timeline = schedule.simulate(Times(2, 1, 3), memory, edges=edges)
    for rank in range(schedule.num_ranks):
        time, amount = timeline.held(rank)
        resident = 3 * schedule.placement.count(rank)
        assert amount[0] == amount[-1] == resident
        assert amount.max() == timeline.peak_memory[rank]
        assert (np.diff(time) >= 0).all()
        for moment in (time[:-1] + time[1:]) / 2:
            held = resident
            for stage in range(schedule.num_stages):
                for m in range(schedule.num_microbatches):
                    spans = {
                        task: (t.start, t.end)
                        for t in timeline.tasks
                        for part in t.action.parts
                        for task in ("IW" if part.kind is B else part.kind.name)
                        if (t.rank, part.stage, part.microbatch) == (rank, stage, m)
                    }
                    fused = spans and spans["I"] == spans["W"]
                    if spans and spans["F"][0] <= moment < spans["I"][1]:
                        held += activation[stage]
                    elif spans and not fused and spans["I"][1] <= moment < spans["W"][1]:
                        held += handover[stage]
            if moment not in time:
                assert amount[np.searchsorted(time, moment, side="right") - 1] == held
