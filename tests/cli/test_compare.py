"""`plait compare` and `plait train` for real, on the smallest model."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.core_ir.numerics import tolerance

CONTRACT = {
    *("frontend", "backend", "engine", "schedule", "ranks", "microbatches", "dtype", "device"),
    *("versions", "loss", "reference_loss", "max_grad_error", "step_seconds"),
    *("tokens_per_second", "peak_memory_bytes", "bubble_rate", "compile_seconds"),
    "simulated_step_seconds",
}


def plait(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plait", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=240,
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One comparison: both frontends, an engine of each backend, two schedules, then a training of each."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "out").mkdir()
    options = ("--engine", "local,mpmd", "--schedule", "1f1b,zb-h1", "--codegen", "eager")
    sizes = ("--microbatches", "4", "--steps", "2", "--train", "3", "--json", "out/figures.json")
    done = plait("compare", "mlp", *options, *sizes, folder=folder)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((folder / "out/figures.json").read_text())
    return {**content, "stdout": done.stdout, "stderr": done.stderr}


def test_rows_are_frontends_by_engines_by_schedules(compared: dict[str, Any]) -> None:
    found = [(r["backend"], r["engine"], r["frontend"], r["schedule"]) for r in compared["rows"]]
    assert found == [
        (backend, engine, frontend, schedule)
        for backend, engine in (("torch", "local"), ("jax", "mpmd"))
        for frontend in ("torch", "flax")
        for schedule in ("1f1b", "zb-h1")
    ]


def test_rows_agree_with_the_unpipelined_framework(compared: dict[str, Any]) -> None:
    for row in compared["rows"]:
        same = row["frontend"] == {"torch": "torch", "jax": "flax"}[row["backend"]]
        allowed = tolerance("f32", "framework" if same else "backends")
        assert row["max_grad_error"] <= allowed.grads
        assert math.isclose(row["loss"], row["reference_loss"], rel_tol=allowed.loss)
        assert row["within_tolerance"]
    losses = [row["reference_loss"] for row in compared["rows"]]
    assert max(losses) - min(losses) <= 1e-6 * min(losses)  # both frontends have the same weights


def test_rows_have_the_fields_of_the_contract(compared: dict[str, Any]) -> None:
    for row in compared["rows"]:
        assert set(row) >= CONTRACT
        assert row["step_seconds"]["median"] > 0
        assert row["peak_memory_bytes"] > 2**20
        assert 0 < row["bubble_rate"] < 1
        assert 0 < row["simulated_step_seconds"] < 10 * row["step_seconds"]["median"]
        assert row["tokens_per_second"] == pytest.approx(8 / row["step_seconds"]["median"])


def test_trainings_start_from_the_same_loss_and_stay_together(compared: dict[str, Any]) -> None:
    torch_row, jax_row = compared["training"]
    assert (torch_row["backend"], torch_row["frontend"]) == ("torch", "torch")
    assert (jax_row["backend"], jax_row["frontend"]) == ("jax", "flax")
    assert torch_row["loss_before"] == pytest.approx(jax_row["loss_before"], rel=1e-5)
    assert torch_row["loss_after"] == pytest.approx(jax_row["loss_after"], rel=1e-5)
    assert torch_row["loss_after"] != torch_row["loss_before"]


def test_ranks_in_processes_of_their_own_give_one_row_and_the_same_training(
    compared: dict[str, Any], tmp_path: Path
) -> None:
    options = ("--frontend", "flax", "--engine", "distributed", "--codegen", "eager")
    sizes = ("--microbatches", "4", "--steps", "2", "--train", "3", "--json", "figures.json")
    page = ("--timeline", "steps.html")
    done = plait("compare", "mlp", *options, *sizes, *page, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "figures.json").read_text())
    (row,), (training,) = content["rows"], content["training"]
    assert (row["ranks"], row["stages"], row["engine"]) == (2, 2, "distributed")
    assert row["within_tolerance"]
    assert not {"checked", "timeline"} & set(row)
    titles = ("measured", "simulated from measured task times")
    assert re.findall(r"<h2>(.*?)</h2>", (tmp_path / "steps.html").read_text()) == [
        f"flax on torch distributed, 1f1b: {title}" for title in titles
    ]
    same = compared["training"][1]
    assert training["frontend"] == same["frontend"] == "flax"
    assert training["loss_before"] == pytest.approx(same["loss_before"], rel=1e-5)
    assert training["loss_after"] == pytest.approx(same["loss_after"], rel=1e-5)


def test_table_is_on_standard_output_and_progress_is_not(compared: dict[str, Any]) -> None:
    assert "grad error" in compared["stdout"]
    assert "compiling" not in compared["stdout"]
    assert "flax on jax mpmd, zb-h1: compiling" in compared["stderr"]
    assert "torch on torch local: training" in compared["stderr"]


def test_model_of_ones_own_is_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text((Path(__file__).parent / "builds.py").read_text())
    options = ("--engine", "local", "--ranks", "1", "--codegen", "eager", "--steps", "2")
    done = plait("train", "own:working", *options, "--json", "f.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "f.json").read_text())["training"]
    assert row["loss_after"] < row["loss_before"]


def test_failing_worker_is_one_error_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build():\n    raise ValueError('no such data set')\n")
    done = plait("compare", "own:build", "--engine", "local", "--ranks", "1", folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("error: torch local: ValueError: no such data set") == 1


def test_nan_is_exit_code_1_though_both_sides_have_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text((Path(__file__).parent / "builds.py").read_text())
    options = ("--engine", "local", "--ranks", "1", "--codegen", "eager", "--steps", "1")
    done = plait("compare", "own:not_a_number", *options, folder=tmp_path)
    assert done.returncode == 1
    assert "NaN or infinity in the loss (nan)" in done.stderr


def test_a_model_without_cuts_is_told_how_to_cut_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text((Path(__file__).parent / "builds.py").read_text())
    done = plait("compare", "own:working", "--engine", "local", folder=tmp_path)
    assert done.returncode == 2
    assert "1f1b on 2 ranks runs 2 stages" in done.stderr
    assert "--split" in done.stderr
    assert "num_ranks" not in done.stderr


def test_a_jax_model_in_bf16_rounds_on_both_backends_as_jax_does(tmp_path: Path) -> None:
    options = ("--frontend", "flax", "--engine", "local,mpmd", "--codegen", "eager", "--steps", "1")
    done = plait("compare", "mlp", "--dtype", "bf16", *options, "--json", "f.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == ["torch", "jax"]
    assert max(row["max_grad_error"] for row in rows) <= tolerance("bf16", "framework").grads


def test_a_file_that_cannot_be_written_is_found_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for option in ("--json", "--timeline"):
        done = plait("compare", "mlp", option, "file/out.html", folder=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: cannot write file/out.html: ")
        assert len(done.stderr.splitlines()) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_that_ran_are_kept_when_a_later_one_fails(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        (Path(__file__).parent / "builds.py").read_text()
        + "\ndef build():\n    loss_fn, model, batch = working()\n    return loss_fn, model, batch[:4]\n"
    )
    options = ("--engine", "local", "--ranks", "1", "--codegen", "eager", "--steps", "1")
    files = ("--microbatches", "4,8", "--json", "f.json")
    done = plait("compare", "own:build", *options, *files, folder=tmp_path)
    assert done.returncode == 1
    assert "the batch has 4 rows" in done.stderr.splitlines()[-1]
    assert "grad error" in done.stdout
    (row,) = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert row["microbatches"] == 4
