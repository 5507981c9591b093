"""The distributed engine on two and four gloo processes."""

from pathlib import Path

import pytest
from process_group import run_ranks

SCRIPT = Path(__file__).with_name("distributed_runs.py")


@pytest.mark.parametrize(
    ("what", "num_ranks"),
    [
        ("steps", 2),
        ("steps", 4),
        ("meta", 2),
        ("partial_batch", 2),
        ("compile_error", 2),
        ("different", 2),
        ("profile", 2),
        ("auto", 2),
        ("data_parallel", 4),
        ("aux", 2),
        ("user_error", 2),
        ("different_values", 2),
        ("measure", 3),
        ("clocks", 3),
    ],
)
def test_ranks(what: str, num_ranks: int) -> None:
    for rank, finished in enumerate(run_ranks(SCRIPT, [what], num_ranks)):
        assert finished.status == 0, f"rank {rank}: {finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_rank_that_ends_before_it_has_compiled_is_noticed(when: str) -> None:
    here, gone = run_ranks(SCRIPT, ["gone", when], 2)
    assert (here.status, gone.status) == (7, 3), here.stderr[-3000:]
    assert here.stdout == "noticed\n"


@pytest.mark.parametrize(
    ("num_ranks", "codegen", "num_microbatches"),
    [(2, "inductor", 4), (2, "eager", 9), (4, "eager", 8)],
)
def test_every_schedule(num_ranks: int, codegen: str, num_microbatches: int) -> None:
    ranks = run_ranks(SCRIPT, ["schedules", codegen, str(num_microbatches)], num_ranks)
    for rank, finished in enumerate(ranks):
        assert finished.status == 0, f"rank {rank}: {finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")


@pytest.mark.parametrize(
    ("task", "how"), [("F", "raise"), ("I", "raise"), ("W", "raise"), ("F", "exit"), ("I", "kill")]
)
def test_r76_a_failing_rank_takes_the_others_down(task: str, how: str) -> None:
    ranks = run_ranks(SCRIPT, ["failing", task, how], 3)
    gone = {"raise": 7, "exit": 3, "kill": -9}[how]
    assert [r.status for r in ranks] == [7, gone, 7], [r.stderr[-2000:] for r in ranks]
    for rank in (0, 2):
        if how != "raise":
            assert "another rank has ended" in ranks[rank].stdout
        assert f"rank {1 if how == 'raise' else ''}" in ranks[rank].stdout
