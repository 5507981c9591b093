"""Sharded parameters on the distributed engine, beside the same mesh without shards."""

import os
from pathlib import Path

import pytest
from process_group import run_ranks

SCRIPT = Path(__file__).with_name("sharded_runs.py")
TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "runs",
    [
        ["schedules"],
        ["inductor"],
        ["buckets", "shared", "frozen"],
        ["some_stages", "wide_reduction", "four", "hybrid"],
        ["on_meta", "jax_model", "parts_of_parts", "mistakes", "profiled"],
    ],
    ids="-".join,
)
def test_ranks(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    for rank, finished in enumerate(run_ranks(SCRIPT, runs, 4)):
        assert finished.status == 0, f"rank {rank}: {finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")
