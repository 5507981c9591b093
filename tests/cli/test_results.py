"""Rows of ranks merged into one, and what is written and shown of them."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plait.compare.measure import merge
from plait.compare.report import Display, rows_table, training_table
from plait.compare.run import Results
from plait.core_ir.errors import ExecutionError, UsageError

ROW: dict[str, Any] = {
    "model": "mlp",
    "frontend": "torch",
    "backend": "torch",
    "engine": "distributed",
    "schedule": "1f1b",
    "ranks": 2,
    "mesh": None,
    "axis_roles": {},
    "stages": 2,
    "microbatches": 4,
    "dtype": "f32",
    "device": "cpu",
    "loss": 0.5,
    "loss_error": 1e-8,
    "max_grad_error": 1e-7,
    "tolerance": {"loss": 1e-6, "grads": 1e-5},
    "step_seconds": {"median": 0.02, "spread": 0.001, "steps": 5},
    "tokens_per_second": 1000.0,
    "peak_memory_bytes": 100 * 2**20,
    "simulated_step_seconds": 0.0175,
    "bubble_rate": 0.25,
    "compile_seconds": 2.0,
    "finite": True,
    "reference_loss": 0.5,
    "checked": ["a"],
    "expected": ["a", "b"],
}


def test_merge_takes_the_worst_of_errors_and_memory_and_the_times_of_rank_0() -> None:
    other = {
        **ROW,
        "loss": 0.75,
        "max_grad_error": 3e-7,
        "peak_memory_bytes": 200 * 2**20,
        "step_seconds": {"median": 9.0, "spread": 9.0, "steps": 5},
        "compile_seconds": 3.0,
        "checked": ["b"],
    }
    row = merge([ROW, other])
    assert row["max_grad_error"] == 3e-7
    assert row["peak_memory_bytes"] == 200 * 2**20
    assert row["compile_seconds"] == 3.0
    assert row["step_seconds"] == ROW["step_seconds"]
    assert row["loss"] == 0.5
    assert row["within_tolerance"] is True
    Results([row]).check()
    assert "checked" not in row


def test_gradient_that_no_rank_checked_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"no rank gave the gradients \['b'\]"):
        merge([ROW, ROW])


@pytest.mark.parametrize("error", [2e-5, math.inf])
def test_row_out_of_tolerance_says_so(error: float) -> None:
    row = merge([{**ROW, "checked": ["a", "b"], "max_grad_error": error}])
    assert row["within_tolerance"] is False
    with pytest.raises(
        ExecutionError, match=r"torch on torch distributed, 1f1b: .* \(at most 1e-05"
    ):
        Results([row]).check()


def test_row_of_nan_is_out_of_tolerance_though_the_framework_has_nan_too() -> None:
    nan = {"loss": math.nan, "reference_loss": math.nan, "loss_error": 0.0, "max_grad_error": 0.0}
    row = merge([{**ROW, "checked": ["a", "b"]}, {**ROW, **nan, "finite": False}])
    assert row["within_tolerance"] is False
    row = merge([{**ROW, **nan, "checked": ["a", "b"], "finite": False}])
    with pytest.raises(ExecutionError, match=r"NaN or infinity in the loss \(nan\)"):
        Results([row]).check()


def test_json_that_cannot_be_written_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write"):
        Results().write_json(tmp_path / "file" / "figures.json")


def test_json_holds_rows_and_trainings_and_no_number_that_json_lacks(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    Results([{"loss": math.nan, "ranks": 2}], [{"loss_after": 1.5}]).write_json(file)
    content = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert content == {"rows": [{"loss": None, "ranks": 2}], "training": [{"loss_after": 1.5}]}


def test_tables_show_the_figures() -> None:
    training = {**ROW, "steps": 100, "loss_before": 5.5, "loss_after": 2.25, "seconds": 3.0}
    console = Console(file=io.StringIO(), width=160)
    console.print(rows_table([merge([{**ROW, "checked": ["a", "b"]}])]), training_table([training]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("0.500000", "1.0e-07", "20.0 ± 1.0", "17.5", "25.0%", "5.500000", "2.250000"):
        assert shown in text


def test_title_names_the_mesh_and_what_its_axes_are_for() -> None:
    console = Console(file=io.StringIO(), width=160)
    row = merge([{**ROW, "checked": ["a", "b"], "mesh": {"stage": 2, "data": 2, "tensor": 4}}])
    roles = [
        {"data": "data parallel", "tensor": role} for role in ("the model's own", "data parallel")
    ]
    console.print(rows_table([{**row, "axis_roles": role} for role in roles]))
    assert (
        "2 stages, mesh stage=2, data=2 (data parallel), tensor=4 (the model's own; or data parallel), 4 microbatches"
        in " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    )


def test_progress_is_a_line_for_each_piece_of_work_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Display(console) as display:
        for done in range(3):
            display.show("torch local: training", done, 3)
        display.show("jax mpmd: training", 0, 3)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines() == ["torch local: training", "jax mpmd: training"]


def test_progress_is_a_bar_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Display(console) as display:
        display.show("training", 1, 2)
    assert "1/2" in console.file.getvalue()  # type: ignore[attr-defined]
