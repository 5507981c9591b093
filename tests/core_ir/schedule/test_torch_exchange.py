"""Schedules exchanged with torch.distributed.pipelining as CSV files, both ways."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as pipelining

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule import Schedule, Times, build
from plait.core_ir.schedule.families import FAMILIES
from plait.core_ir.schedule.kinds import KINDS, OVERLAP_F_B, B, F


class TorchSchedules:
    """What is private in torch.distributed.pipelining, in one place; tried with torch 2.13."""

    def export(self, name: str, p: int, v: int, m: int, path: Path, lowered: bool = False) -> None:
        """Write torch's own schedule; no process group is needed to make one."""
        stages = [
            SimpleNamespace(
                group_size=p, group_rank=0, num_stages=p * v, stage_index=k * p, submod=None
            )
            for k in range(v)
        ]
        made = getattr(pipelining, name)
        if name == "Schedule1F1B":
            order = made(stages[0], m).pipeline_order
        else:
            schedule = made(stages, m)
            order = schedule.pipeline_order_with_comms if lowered else schedule.pipeline_order
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(order[rank] for rank in sorted(order))

    def read(self, path: Path) -> dict[int, list]:
        """Each rank's actions, as torch reads them."""
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        parse = pipelining._Action.from_str
        return {rank: [parse(cell) for cell in row] for rank, row in enumerate(rows)}

    def validate(self, order: dict[int, list], num_stages: int, m: int) -> dict[int, int]:
        """Torch's own check: the rank of each stage."""
        return pipelining._validate_schedule(order, len(order), num_stages, m)

    def simulate(self, order: dict[int, list], placement: dict[int, int]) -> dict[int, list]:
        """Torch's own simulator in unit times: each rank's steps, None for an idle one."""
        return pipelining._simulate_comms_compute(order, placement.__getitem__, len(placement))

    def lower(self, order: dict[int, list], placement: dict[int, int]) -> dict[int, list]:
        return pipelining._add_send_recv(order, placement.__getitem__, len(placement))


TORCH = TorchSchedules()
NAMES = [recipe.name for recipe in FAMILIES] + ["auto"]


def schedule_of(name: str, p: int, m: int) -> Schedule:
    return build(name, p, 2 * p if name == "dualpipev" else m)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (4, 8)])
def test_torch_accepts_ours(tmp_path, name, p, m):
    schedule = schedule_of(name, p, m)
    path = tmp_path / "ours.csv"
    schedule.to_csv(path)
    order = TORCH.read(path)
    placement = TORCH.validate(order, schedule.num_stages, schedule.num_microbatches)
    assert tuple(placement[s] for s in range(schedule.num_stages)) == schedule.placement


# Torch's simulator knows no pairs.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "dualpipev"])
@pytest.mark.parametrize("whose_messages", ["torch's", "ours"])
def test_torchs_simulator_runs_ours(tmp_path, name, whose_messages):
    schedule = schedule_of(name, 3, 6)
    path = tmp_path / "ours.csv"
    placement = dict(enumerate(schedule.placement))
    (schedule.lower() if whose_messages == "ours" else schedule).to_csv(path)
    order = TORCH.read(path)
    if whose_messages == "torch's":
        order = TORCH.lower(order, placement)
    expected = {rank: list(row) for rank, row in order.items()}
    steps = TORCH.simulate(order, placement)
    assert {rank: [a for a in row if a is not None] for rank, row in steps.items()} == expected


def test_torch_lowers_our_pairs(tmp_path):
    schedule = build("dualpipev", 3, 6)
    path = tmp_path / "ours.csv"
    schedule.to_csv(path)
    lowered = TORCH.lower(TORCH.read(path), dict(enumerate(schedule.placement)))
    ours = schedule.lower()
    for rank, row in lowered.items():
        assert sorted(map(str, row)) == sorted(map(str, ours.rank(rank)))


# Class name, stages a rank, and ours that is the same.
THEIRS = [
    ("ScheduleInterleaved1F1B", 2, "interleaved-1f1b"),
    ("ScheduleInterleavedZeroBubble", 2, None),
    ("ScheduleZBVZeroBubble", 2, "zbv"),
    ("ScheduleDualPipeV", 2, "dualpipev"),
]


@pytest.mark.parametrize(("torch_name", "v", "name"), THEIRS)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
def test_ours_accepts_torchs(tmp_path, torch_name, v, name, p, m):
    path = tmp_path / "theirs.csv"
    TORCH.export(torch_name, p, v, m, path)
    schedule = Schedule.from_csv(path)
    schedule.validate()
    schedule.lower().validate()
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (p, v * p, m)
    if name is not None:
        assert schedule == build(name, p, m)
    again = tmp_path / "again.csv"
    schedule.to_csv(again)
    before, after = TORCH.read(path), TORCH.read(again)
    assert {r: [a for a in row if a is not None] for r, row in before.items()} == after


@pytest.mark.parametrize(("torch_name", "v", "name"), THEIRS)
def test_ours_reads_torchs_with_messages(tmp_path, torch_name, v, name):
    path = tmp_path / "theirs.csv"
    TORCH.export(torch_name, 4, v, 8, path, lowered=True)
    schedule = Schedule.from_csv(path)
    assert schedule.is_lowered
    assert {KINDS[code].name for code in schedule.kind} >= {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
    # Torch's runtime does not wait for its sends; made anew, the messages end on any runtime.
    schedule.lower().validate()
    assert schedule.simulate(Times(1, 1, 1)).makespan > 0


def test_torchs_broken_1f1b_is_a_clear_error(tmp_path):
    path = tmp_path / "Schedule1F1B.csv"
    TORCH.export("Schedule1F1B", 4, 1, 8, path)
    with pytest.raises(
        ScheduleError,
        match=r"Schedule1F1B\.csv, row 4, column 2: 3B0 has no forward: the forwards of stage 3 are of"
        r" microbatches 1 to 8, its backwards of 0 to 7; .* exports Schedule1F1B so",
    ):
        Schedule.from_csv(path)


def test_pairs_are_read_as_two_tasks(tmp_path):
    path = tmp_path / "theirs.csv"
    TORCH.export("ScheduleDualPipeV", 2, 2, 4, path)
    pairs = [a for a in Schedule.from_csv(path).rank(0) if a.kind is OVERLAP_F_B]
    assert pairs
    assert all([part.kind for part in pair.parts] == [F, B] for pair in pairs)
