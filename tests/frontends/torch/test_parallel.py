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


def run(script: str, arguments: list[str], num_ranks: int) -> None:
    path = Path(__file__).with_name(script)
    for rank, finished in enumerate(run_ranks(path, arguments, num_ranks)):
        assert finished.status == 0, f"rank {rank}:\n{finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")


def test_models_with_collectives_give_what_ranks_give() -> None:
    run("parallel_runs.py", [], 4)


def test_models_of_dtensors_give_what_ranks_and_the_plain_model_give() -> None:
    plans = ["whole head", "prepared", "vocabulary", "sequence and vocabulary"]
    run("dtensor_runs.py", ["captured", *plans], 4)


def test_a_compiled_model_of_dtensors_has_dtensors_as_gradients() -> None:
    run("dtensor_runs.py", ["compiled", "sequence and vocabulary"], 4)


def test_sharded_parameters_give_what_fsdp_gives() -> None:
    run("fsdp_runs.py", ["captured", "sharded", "by columns", "replicated", "bf16", "tensors"], 4)


def test_a_compiled_model_under_fsdp() -> None:
    run("fsdp_runs.py", ["compiled", "sharded", "tensors"], 4)
