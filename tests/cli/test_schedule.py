"""`plait schedule`: list, show, simulate, export."""

import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.cli import main
from plait.core_ir.schedule.registry import recipes


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(("schedule", *arguments))
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_list_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "list")
    assert all(recipe.name in text for recipe in recipes())


def test_show_draws_a_row_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "gpipe", "--ranks", "2", "--microbatches", "2")
    assert text.splitlines() == [
        "rank 0  F0 F1 .........B0    B1",
        "rank 1  ...F0 F1 B0    B1    ......",
    ]


def test_show_text_is_the_schedules_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "1f1b", "--ranks", "2", "--microbatches", "3", "--text")
    assert text == f"{plait.schedule('1f1b', 2, 3)}\n"


def test_simulate_gives_the_known_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "simulate", "1f1b", "--ranks", "4", "--microbatches", "8", "--w", "2")
    # 8 microbatches of F + I + W = 4, and a bubble of (p - 1)(F + I + W) = 12.
    assert "makespan          44" in text
    assert f"bubble rate       {12 / 44:.4f}" in text
    assert "peak activations  4, 3, 2, 1" in text


def test_times_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "simulate", "gpipe", "--ranks", "2", "--microbatches", "1", "--f", "1,5")
    assert "makespan          10" in text  # 1 + 5, then I + W of both


def test_export_writes_what_from_csv_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "zb.csv"
    run(capsys, "export", "zb-h1", str(file), "--ranks", "3", "--microbatches", "5")
    expected = plait.schedule("zb-h1", 3, 5)
    found = plait.Schedule.from_csv(file)
    assert [found.rank(r) for r in range(3)] == [expected.rank(r) for r in range(3)]
    assert run(capsys, "show", str(file)) == run(
        capsys, "show", "zb-h1", "--ranks", "3", "--microbatches", "5"
    )


def test_module_can_be_run_and_says_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "plait.cli", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("compare", "train", "program", "schedule"):
        assert command in done.stdout
