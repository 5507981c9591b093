"""Jobs over the models of `builds.py`, and what their processes left behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.compare.job import Job

HERE = Path(__file__).parent


@pytest.fixture
def make_job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """A job of one row on the torch backend; `builds` can be imported by its workers."""
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)

    def make(model: str, **changes: object) -> Job:
        fields: dict[str, object] = {
            "model": model,
            "config": "tiny",
            "dtype": "f32",
            "batch_size": 8,
            "split": None,
            "backend": "torch",
            "engine": "local",
            "codegen": "eager",
            "device": "cpu",
            "num_ranks": 1,
            "axes": {},
            "changes": {},
            "num_microbatches": 2,
            "frontends": (None,),
            "schedules": ("1f1b",),
            "steps": 1,
        }
        return Job(**{**fields, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def left_alive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[int]]:
    """Processes, of those that workers noted, that still run; there must have been some.

    A process that was killed a moment ago may still be on its way out.
    """
    monkeypatch.setenv("PROCESS_IDS", str(tmp_path))

    def alive() -> list[int]:
        pids = [int(file.name) for file in tmp_path.iterdir()]
        assert pids
        deadline = time.monotonic() + 10
        while any(map(_runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [pid for pid in pids if _runs(pid)]

    return alive


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")
    return "State:\tZ" not in (status.read_text() if status.exists() else "")
