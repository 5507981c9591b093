"""`plait schedule`: list, show, simulate, export."""

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

import plait
from plait import cli_schedule
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


def test_pictures_go_to_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {kind: tmp_path / f"picture.{kind}" for kind in ("svg", "html", "trace")}
    options = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    text = run(capsys, "show", "zbv", "--ranks", "2", "--microbatches", "4", *options)
    assert text.count("wrote") == 3
    assert xml.etree.ElementTree.parse(files["svg"]).getroot().tag.endswith("svg")
    assert "<script" in files["html"].read_text()
    events = json.loads(files["trace"].read_text())["traceEvents"]
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == 2 * 4 * 2 * 3  # ranks, microbatches, stages a rank, F I W


def test_simulate_all_is_one_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_schedule, "SWEEP_RANKS", (4,))
    monkeypatch.setattr(cli_schedule, "SWEEP_FACTORS", (1, 2))
    rows = [line.split("│") for line in run(capsys, "simulate", "all").splitlines()]
    makespans = {(row[1].strip(), row[3].strip()): row[4].strip() for row in rows if len(row) > 4}
    assert makespans["1f1b", "8"] == "33"  # (m + p - 1)(F + I + W)
    assert makespans["zbv", "8"] == "51"
    assert makespans["dualpipev", "8"] == "54"
    assert makespans["dualpipev", "4"] == ""


def test_a_barrier_before_the_optimizer_step_costs_zero_bubble_its_shape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step_time(sync: str) -> float:
        options = ("--ranks", "4", "--microbatches", "12", "--optimizer", "1", "--sync", sync)
        text = run(capsys, "simulate", "zb-h2", *options)
        return float(text.split("step time")[1].split()[0])

    assert step_time("none") == step_time("post_validate") < step_time("barrier")


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_a_terminal_gets_the_colors_and_the_columns_it_has(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "48;2;138;184;232" in run(capsys, "show", "zbv")
    monkeypatch.setenv(variable, "dumb")
    plain = run(capsys, "show", "zbv")
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 60


def test_a_file_gets_every_label(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "zbv").startswith("rank 0  0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0")


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(("schedule", *arguments))
    assert caught.value.code != 0
    return capsys.readouterr().err


def test_list_says_where_its_formulas_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert "They hold for equal\nstages, no communication" in run(capsys, "list")


def test_tables_are_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def width() -> int:
        return max(len(line) for line in run(capsys, "list").splitlines() if "│" in line)

    monkeypatch.setenv("COLUMNS", "80")
    assert width() == 160
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    assert width() == 80


def test_simulate_all_takes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ranks", "2", "--microbatches", "4", "--stages-per-rank", "2")
    text = run(capsys, "simulate", "all", *options, "--memory-limit", "4", "--optimizer", "1")
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    found = {row[1]: row for row in rows if len(row) > 4 and row[1]}
    assert {tuple(row[2:4]) for row in found.values()} == {("2", "4")}
    assert found["v-half"][7] == "4"
    why = " ".join(row[7] for row in rows if len(row) > 4)
    assert "schedule '1f1b' cannot have 2 stages a rank" in why
    assert "over the memory limit of 4" in why
    # Two optimizer steps of 1, one for each stage, at the end of a rank.
    expected = plait.schedule("v-half", 2, 4).simulate(plait.Times(1, 1, 1, optimizer=1))
    assert float(found["v-half"][4]) == expected.makespan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("1f1b", "--ranks", "2000000000"), "48000000000 tasks; a schedule has at most"),
        (("1f1b", "--ranks", "99999999999999999999"), "num_ranks must be 2147483647 or less"),
        (("1f1b", "--memory-limit", "nan"), "memory_limit must be a number or None, got nan"),
        (("all", "--memory-limit", "nan"), "memory_limit must be a number or None, got nan"),
        (("1f1b", "--f", "\u0661"), "--f takes numbers by comma"),
        (("1f1b", "--f", "1e308", "--i", "1e308"), "0 or from 1e-100 to 1e+100, got 1e+308"),
    ],
)
def test_numbers_that_do_not_fit_are_errors(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert message in fail(capsys, "simulate", *options)


def test_text_and_files_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    text = run(capsys, "show", "1f1b", "--text", "--svg", str(file))
    assert text == f"{plait.schedule('1f1b', 4, 8)}\nwrote {file}\n"
    assert file.read_text().startswith("<svg")


def test_export_searches_for_the_times_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "auto.csv"
    options = ("--ranks", "2", "--microbatches", "3", "--f", "1,4", "--w", "2", "--comm", "0.5")
    options = (*options, "--transfer", "1", "--memory-limit", "2")
    run(capsys, "export", "auto", str(file), *options)
    times = plait.Times([1, 4], 1, 2, comm=0.5, transfer=1)
    found = plait.Schedule.from_csv(file)
    assert found == plait.schedule("auto", 2, 3, times=times, memory_limit=2)
    makespan = found.simulate(times).makespan
    shown = run(capsys, "simulate", str(file), *options[4:])
    assert f"makespan          {makespan:g}" in shown
    assert "cannot write" in fail(capsys, "export", "1f1b", str(tmp_path))


def test_a_file_has_its_own_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "two.csv"
    run(capsys, "export", "1f1b", str(file), "--ranks", "2", "--microbatches", "3")
    run(capsys, "simulate", str(file), "--ranks", "2", "--stages-per-rank", "1")
    assert "--ranks is 3, but" in fail(capsys, "simulate", str(file), "--ranks", "3")
    assert "over the memory limit of 1" in fail(
        capsys, "simulate", str(file), "--memory-limit", "1"
    )


def test_no_times_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", "1f1b", "--f", "0", "--i", "0", "--w", "0")
    assert text == "nothing to draw: no task takes any time\n"
