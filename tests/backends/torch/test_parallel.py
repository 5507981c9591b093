"""Models with collectives of their own on the distributed engine."""

from pathlib import Path

import pytest
from process_group import run_ranks

SCRIPT = Path(__file__).with_name("parallel_runs.py")


@pytest.mark.parametrize(("what", "num_ranks"), [("tensor_parallel", 4), ("tensor_parallel", 8)])
def test_ranks(what: str, num_ranks: int) -> None:
    for rank, finished in enumerate(run_ranks(SCRIPT, [what], num_ranks)):
        assert finished.status == 0, f"rank {rank}: {finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")
