"""Models with collectives: on gloo ranks in torch, and as they are captured."""

import os
from pathlib import Path

import pytest
from process_group import run_ranks

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import what tests share."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)


def test_models_with_collectives_give_what_ranks_give() -> None:
    script = Path(__file__).with_name("parallel_runs.py")
    for rank, finished in enumerate(run_ranks(script, [], 4)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")
