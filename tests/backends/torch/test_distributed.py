"""The distributed engine on two and four gloo processes."""

from pathlib import Path

import pytest
from process_group import run_ranks

SCRIPT = Path(__file__).with_name("distributed_runs.py")


@pytest.mark.parametrize(
    ("what", "num_ranks"),
    [
        ("steps", 2),
        ("steps", 4),
        ("meta", 2),
        ("partial_batch", 2),
        ("compile_error", 2),
        ("different", 2),
        ("profile", 2),
    ],
)
def test_ranks(what: str, num_ranks: int) -> None:
    for rank, finished in enumerate(run_ranks(SCRIPT, [what], num_ranks)):
        assert finished.status == 0, f"rank {rank}: {finished.stderr[-3000:]}"
        assert finished.stdout.endswith("done\n")
