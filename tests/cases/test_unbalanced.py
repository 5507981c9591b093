"""Routing that could not be less balanced: every token to the same two experts of one rank, and none is dropped."""

import os
from pathlib import Path

import pytest
from process_group import run_ranks
from unbalanced import CASE, check_unbalanced

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("frontend", "engine"), [("flax", "mpmd"), ("flax", "spmd"), ("torch", "mpmd")]
)
def test_on_devices(frontend: str, engine: str) -> None:
    check_unbalanced(frontend, "jax", engine)


@pytest.mark.timeout(600)
def test_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    script = Path(__file__).with_name("unbalanced_runs.py")
    for rank, finished in enumerate(run_ranks(script, [], CASE.num_ranks, watchdog=400)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")
