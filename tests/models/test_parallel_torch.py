"""Torch models over a mesh: torch, the captured program and the plain model agree, and so do pipelines of them."""

import os
from pathlib import Path

import pytest
from process_group import run_ranks

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import what tests share."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)


def run(num_ranks: int, *arguments: str) -> None:
    script = Path(__file__).with_name("parallel_torch_runs.py")
    for rank, finished in enumerate(run_ranks(script, [*arguments], num_ranks)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")


def test_llama_and_deepseek_v3_as_captured() -> None:
    run(2, "captured", "tensor", "sequence", "context", "expert")


def test_llama_over_two_axes_as_captured() -> None:
    run(4, "captured", "all")


@pytest.mark.parametrize("name", ["sequence", "context", "expert"])
def test_a_pipeline(name: str) -> None:
    run(4, "compiled", name)
