"""Models from outside, with no change to them, under DualPipeV on every engine."""

import os
from pathlib import Path

import pytest
from plain_models import MODELS
from process_group import run_ranks

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("engine", ["local", "mpmd", "spmd"])
@pytest.mark.parametrize("name", MODELS)
def test_in_one_process(name: str, engine: str) -> None:
    MODELS[name]().check(engine)


def test_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    script = Path(__file__).with_name("plain_model_runs.py")
    for rank, finished in enumerate(run_ranks(script, list(MODELS), 2)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr[-3000:]}"
        assert finished.stdout.splitlines() == [*MODELS, "done"]
