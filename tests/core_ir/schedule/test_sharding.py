"""UNSHARD, RESHARD and REDUCE_GRAD: where `lower` puts them, what `validate` refuses, what they cost."""

from pathlib import Path

import numpy as np
import pytest
from stage_programs import layers

from plait.core_ir.errors import ScheduleError
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.passes.shard_parameters import Sharding, shard_parameters
from plait.core_ir.schedule import Memory, Schedule, Times, build, render_svg, render_trace
from plait.core_ir.schedule.estimate import estimate
from plait.core_ir.schedule.kinds import IS_COMPUTE, IS_MESSAGE, REDUCE_GRAD, RESHARD, UNSHARD
from plait.core_ir.schedule.rewrite import add_optimizer, keep
from plait.core_ir.schedule.sharding import add_sharding
from plait.core_ir.shards import Reshard, ShardedStages

NAMES = ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv", "dualpipev"]


def all_of(schedule: Schedule, reshard: Reshard = "after_backward") -> ShardedStages:
    stages = tuple(range(schedule.num_stages))
    return ShardedStages(stages, stages, reshard)


def on_one_rank(row: str, num_stages: int = 2, num_microbatches: int = 1) -> Schedule:
    return Schedule.from_actions("row", [0] * num_stages, num_microbatches, [row.split()])


def row_of(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.rank(rank)))


def test_a_stage_is_gathered_while_the_one_before_it_runs() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    assert row_of(plain.lower(sharded=all_of(plain))) == (
        "0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )
    three = on_one_rank("0F0 0F1 1F0 1F1 2F0 2B0 2F1 2B1 1B0 1B1 0B0 0B1", 3, 2)
    assert row_of(three.lower(sharded=ShardedStages((0, 1, 2), ()))) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 2UNSHARD 1F0 1F1 2F0 2B0 2F1 2B1 2RESHARD 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD"
    )


def test_a_stage_is_freed_after_its_forwards_where_others_run_meanwhile() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    assert row_of(plain.lower(sharded=all_of(plain, "after_forward"))) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 0UNSHARD 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )
    # Between 1F0 and 1B0 nothing runs; one action alone would run while both are held.
    alone = Schedule.from_actions(
        "one", [0, 1], 2, ["0F0 0F1 0B0 0B1".split(), "1F0 1B0 1F1 1B1".split()]
    )
    for reshard in ("after_backward", "after_forward"):
        kinds = alone.lower(sharded=all_of(alone, reshard)).kind  # type: ignore[arg-type]
        assert (kinds == UNSHARD.code).sum() == 2


def test_messages_are_not_held_up() -> None:
    plain = build("1f1b", 2, 2)
    assert row_of(plain.lower(sharded=all_of(plain)), 0) == (
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE_GRAD"
    )
    assert row_of(plain.lower(sharded=all_of(plain)), 1) == (
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RESHARD 1REDUCE_GRAD"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reshard", ["after_backward", "after_forward"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_every_schedule_is_legal_when_sharded(
    name: str, reshard: Reshard, forward_only: bool, tmp_path: Path
) -> None:
    plain = build(name, 4, 8)
    if forward_only:
        plain = plain.forward_only()
    lowered = plain.lower(sharded=all_of(plain, reshard))
    lowered.validate(forward_only=forward_only)
    assert keep(lowered, IS_COMPUTE[lowered.kind]) == plain
    assert keep(lowered, IS_COMPUTE[lowered.kind] | IS_MESSAGE[lowered.kind]) == plain.lower()
    gathers = np.bincount(lowered.stage[lowered.kind == UNSHARD.code], minlength=plain.num_stages)
    assert gathers.min() == 1
    assert gathers.max() <= (1 if reshard == "after_backward" or forward_only else 2)
    reductions = (lowered.kind == REDUCE_GRAD.code).sum()
    assert reductions == (0 if forward_only else plain.num_stages)
    # The text and the CSV form hold all of it, and what is there already stays as it is.
    assert Schedule.from_text(str(lowered)) == lowered
    lowered.to_csv(tmp_path / "it.csv")
    if not forward_only:
        again = Schedule.from_csv(tmp_path / "it.csv")
        assert again == lowered
        assert again.lower(sharded=all_of(plain, reshard)) == lowered


@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
def test_stages_of_one_rank_are_gathered_twice_after_forward(name: str) -> None:
    plain = build(name, 4, 8)
    lowered = plain.lower(sharded=all_of(plain, "after_forward"))
    gathers = np.bincount(lowered.stage[lowered.kind == UNSHARD.code])
    assert gathers[0] == 2  # other stages run between its forwards and its first backward
    assert gathers[-1] == 1  # the last stage's backward follows its forward


def test_frozen_stages_and_stages_that_are_not_sharded_stay_as_they_are() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    assert row_of(plain.lower(sharded=ShardedStages((1,), ()))) == (
        "1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "0F0 0UNSHARD 0B0 0RESHARD",
            "position 0: 0F0 runs while the parameters of stage 0 are sharded",
        ),
        ("0UNSHARD 0F0 0RESHARD 0B0", "position 3: 0B0 runs while .* put 0UNSHARD before it"),
        ("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD", "position 2: 0UNSHARD: stage 0 is gathered already"),
        ("0RESHARD 0UNSHARD 0F0 0B0", "position 0: 0RESHARD: stage 0 is not gathered there"),
        ("0UNSHARD 0F0 0B0", "position 0: 0UNSHARD gathers stage 0, and no RESHARD frees it"),
        ("0F0 0REDUCE_GRAD 0B0", "position 1: 0REDUCE_GRAD comes before rank 0, position 2: 0B0"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "position 3: 0REDUCE_GRAD comes again after"),
    ],
)
def test_what_does_not_fit_is_refused(row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        on_one_rank(row, 1).validate()


def test_pairs_use_both_of_their_stages() -> None:
    row = "1UNSHARD 0F0 1F0 (0F1;1B0)OVERLAP_F_B 1RESHARD 0B0 1F1 1B1 0B1"
    with pytest.raises(
        ScheduleError, match="position 6: 1F1 runs while the parameters of stage 1 are"
    ):
        on_one_rank(row, 2, 2).validate()


# What it costs, by hand.


def starts(schedule: Schedule, times: Times) -> dict[str, tuple[float, float]]:
    return {str(t.action): (t.start, t.end) for t in schedule.simulate(times).tasks}


def test_gathering_takes_the_lane_and_what_runs_the_stage_waits() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    lowered = add_sharding(plain, all_of(plain))
    when = starts(lowered, Times(f=1, i=1, w=1, unshard=2, reduce_grad=4))
    # On the lane: 0UNSHARD 0 to 2, 1UNSHARD 2 to 4, 1REDUCE_GRAD 7 to 11, 0REDUCE_GRAD 11 to 15.
    assert when == {
        "0UNSHARD": (0, 0),
        "1UNSHARD": (0, 0),
        "0F0": (2, 3),
        "1F0": (4, 5),
        "1B0": (5, 7),
        "1RESHARD": (7, 7),
        "1REDUCE_GRAD": (7, 7),
        "0B0": (7, 9),
        "0RESHARD": (9, 9),
        "0REDUCE_GRAD": (9, 9),
        "OPT": (15, 15),
    }
    transfers = lowered.simulate(Times(1, 1, 1, unshard=2, reduce_grad=4)).transfers
    assert transfers is not None
    assert transfers.start.tolist() == [0, 2, 7, 11]
    assert transfers.end.tolist() == [2, 4, 11, 15]


def test_a_pair_waits_for_both_of_its_stages() -> None:
    row = "0UNSHARD 0F0 1F0 0RESHARD 0UNSHARD 1UNSHARD (0F1;1B0)OVERLAP_F_B 1RESHARD 0RESHARD"
    schedule = on_one_rank(row + " 0B0 1F1 1B1 0B1", 2, 2)
    when = starts(schedule, Times(f=1, i=1, w=1, unshard=[3, 5]))
    assert when["0F0"] == (3, 4)
    assert when["(0F1;1B0)OVERLAP_F_B"] == (5 + 8, 5 + 8 + 3)


def test_the_lane_is_shared_with_messages() -> None:
    """Stage 1 is gathered behind the message of stage 0, which runs on the same rank."""
    rows = ["0F0 1UNSHARD 1F0 1B0 1RESHARD 0B0".split(), "2F0 2B0".split()]
    edges = [(0, 1, "activation"), (0, 2, "activation"), (1, 0, "gradient")]
    schedule = Schedule.from_actions("shared", [0, 0, 1], 1, rows)
    times = Times(f=1, i=1, w=1, transfer=3, unshard=2)
    timeline = schedule.simulate(times, edges=edges)
    when = {str(t.action): (t.start, t.end) for t in timeline.tasks}
    assert when["2F0"] == (1 + 3, 5)
    assert when["1F0"] == (1 + 3 + 2, 7)


def test_computing_is_slower_while_parameters_are_gathered() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    lowered = add_sharding(plain, ShardedStages((1,), ()))
    when = starts(lowered, Times(f=4, i=1, w=1, unshard=2, slowdown=2))
    assert when["0F0"] == (0, 5)  # two units at half the pace


def test_many_ranks_give_the_same_times_as_few() -> None:
    """The sweep over lanes and the loop over actions are two ways to one answer."""
    plain = build("1f1b", 30, 30)
    lowered = add_sharding(plain, all_of(plain))
    times = Times(f=1, i=1, w=1, comm=0.5, transfer=0.25, unshard=3, reduce_grad=2)
    timeline = lowered.simulate(times)
    begin = timeline.start[timeline.schedule.offsets[:-1] + 1]
    # The first F of each rank waits for its message: its own parameters are there long before.
    assert begin.tolist() == [3 + 1.75 * rank for rank in range(30)]
    assert timeline.makespan == plain.simulate(replace_unshard(times)).makespan + 3 + 2


def replace_unshard(times: Times) -> Times:
    return Times(f=times.f, i=times.i, w=times.w, comm=times.comm, transfer=times.transfer)


def test_without_times_nothing_changes() -> None:
    for name in NAMES:
        plain = build(name, 4, 8)
        sharded = add_sharding(plain, all_of(plain))
        times = Times(f=1, i=2, w=1.5, comm=0.5, transfer=0.25)
        assert sharded.simulate(times).makespan == plain.simulate(times).makespan


def test_whole_parameters_count_while_they_are_gathered() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    memory = Memory(activation=0, parameters=1, unsharded=[10, 100], gradients=[1000, 10000])
    # Without the actions, all the time.
    assert plain.simulate(Times(1, 1, 1), memory).peak_memory.tolist() == [2 + 110 + 11000]
    sharded = add_sharding(plain, all_of(plain, "after_forward"))
    timeline = sharded.simulate(Times(1, 1, 1), memory)
    time, held = timeline.held(0)
    at = {float(t): float(h) for t, h in zip(time, held, strict=True)}  # what holds from then on
    assert at[1.0] == 2 + 100  # 0F0 is done, stage 0 is free
    assert at[2.0] == 2 + 110 + 10000  # 1B0 begins, and stage 0 is gathered again
    assert timeline.peak_memory.tolist() == [2 + 110 + 10000]
    assert held[-1] == 2


def test_the_search_counts_them_all_the_time() -> None:
    times, memory = Times(1, 1, 1), Memory(activation=1, parameters=2, unsharded=3, gradients=4)
    assert memory.resident([0, 1], 2).tolist() == [9, 9]
    assert build("auto", 2, 4, times=times, memory=memory, memory_limit=11).num_stages >= 2
    with pytest.raises(ScheduleError, match="the least limit possible is"):
        build("auto", 2, 4, times=times, memory=memory, memory_limit=9.5)


def test_the_estimate_of_a_sharded_program() -> None:
    """By hand, of one stage with a weight f32[6, 3] on four ranks: shards of two rows, padded."""
    plain = layers([6, 3])
    program = shard_parameters(plain, Sharding("data"), 4)
    times, memory = estimate(program, [0])
    whole, shard = 6 * 3 * 4, 2 * 3 * 4
    assert memory.unsharded == (whole,)
    assert memory.gradients == (whole,)
    assert memory.parameters == (shard + shard + 2 * shard,)  # weight, gradient, two moments
    _, before = estimate(plain, [0])
    assert before.parameters == (4 * whole,)
    assert before.unsharded == before.gradients == (0,)
    link = CPU_CORE.inside
    assert times.unshard == (pytest.approx(link.seconds(3 * shard)),)  # a ring sends it three times
    padded = 8 * 3 * 4
    assert times.reduce_grad[0] >= link.seconds(padded * 3 // 4)
    assert times.f == estimate(plain, [0])[0].f


def test_an_optimizer_step_that_is_there_waits_for_the_reductions() -> None:
    plain = on_one_rank("0F0 0B0", 1)
    stepped = add_optimizer(add_sharding(plain, all_of(plain)))
    when = starts(stepped, Times(f=1, i=1, w=1, reduce_grad=4, optimizer=2))
    assert when["OPT"] == (7, 9)


def test_pictures_show_collectives_on_the_lane() -> None:
    plain = on_one_rank("0F0 1F0 1B0 0B0")
    timeline = add_sharding(plain, all_of(plain)).simulate(Times(1, 1, 1, unshard=2, reduce_grad=1))
    assert "0UNSHARD" in render_trace(timeline)
    assert "0REDUCE_GRAD" in render_trace(timeline)
    assert render_svg(timeline)


def test_actions_at_one_place_free_first_and_reduce_last() -> None:
    row = "0F0 0B0 1F0 1B0 2F0 2B0"
    lowered = add_sharding(on_one_rank(row, 3), ShardedStages((0, 1, 2), (0, 1, 2)))
    kinds = [str(a) for a in lowered.rank(0)]
    at = kinds.index("0RESHARD")
    assert kinds[at : at + 3] == ["0RESHARD", "2UNSHARD", "0REDUCE_GRAD"]
    assert (lowered.kind == RESHARD.code).sum() == 3
