"""Whatever a worker does, there is one clear error, and no process is left."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.compare.job import Job
from plait.compare.launch import environment, run_job
from plait.core_ir.errors import ExecutionError, PlaitError, UsageError

MakeJob = Callable[..., Job]
LeftAlive = Callable[[], list[int]]


def failure(job: Job, timeout: float = 120.0, error: type[PlaitError] = ExecutionError) -> str:
    with pytest.raises(error) as caught:
        run_job(job, lambda rank, event: None, timeout=timeout)
    return str(caught.value)


def test_build_that_raises(make_job: MakeJob, left_alive: LeftAlive) -> None:
    message = failure(make_job("builds:raising"))
    assert message.startswith("torch local: ValueError: no such data set\n")
    assert "about to fail" in message
    assert 'raise ValueError("no such data set")' in message
    assert left_alive() == []


def test_rank_that_exits_is_named_and_the_others_are_ended(
    make_job: MakeJob, left_alive: LeftAlive
) -> None:
    job = make_job("builds:exiting", engine="distributed", num_ranks=2)
    assert failure(job).startswith("torch distributed, rank 1: the process exited with code 3")
    assert left_alive() == []


def test_worker_that_is_killed(make_job: MakeJob) -> None:
    message = failure(make_job("builds:killed"))
    assert message.startswith("torch local: the process was killed by SIGKILL")


def test_worker_that_hangs_is_ended(make_job: MakeJob, left_alive: LeftAlive) -> None:
    message = failure(make_job("builds:hanging"), timeout=8.0)
    assert message.startswith("torch local: nothing was heard for 8 s of rank 0")
    assert left_alive() == []


def test_error_of_plait_is_said_without_a_traceback(make_job: MakeJob) -> None:
    assert failure(make_job("builds:no_triple"), error=UsageError) == (
        "torch local: builds:no_triple() must return (loss_fn, model, batch), got a function"
    )


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("needing", {}, r"builds:needing needs arguments \(rows\)"),
        ("uneven", {}, "the batch has 7 rows .*num_microbatches=2 does not divide"),
        ("working", {"num_ranks": 2}, "1f1b on 2 ranks runs 2 stages: .* 1 module paths .*--split"),
    ],
)
def test_what_cannot_be_run_as_asked_is_misuse(
    make_job: MakeJob, model: str, changes: dict[str, Any], message: str
) -> None:
    assert re.search(message, failure(make_job(f"builds:{model}", **changes), error=UsageError))


def test_listener_that_raises_ends_the_processes(make_job: MakeJob) -> None:
    def listen(rank: int, event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(make_job("builds:working"), listen, timeout=120.0)


@pytest.mark.parametrize(
    ("model", "sent", "code"),
    [("builds:hanging", signal.SIGINT, 130), ("builds:waiting", signal.SIGKILL, -signal.SIGKILL)],
)
def test_workers_end_with_the_command_that_started_them(
    make_job: MakeJob,
    left_alive: LeftAlive,
    tmp_path: Path,
    model: str,
    sent: signal.Signals,
    code: int,
) -> None:
    options = ("--engine", "local", "--ranks", "1")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # or what runs behind a shell passes on that it ignores it
    command = subprocess.Popen([sys.executable, "-m", "plait.cli", "compare", model, *options])
    while not list(tmp_path.iterdir()) and command.poll() is None:
        time.sleep(0.05)
    command.send_signal(sent)
    assert command.wait(timeout=30) == code
    assert left_alive() == []


def test_environment_of_a_rank(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("WORLD_SIZE", "7")
    ranks = environment(make_job("mlp", engine="distributed", num_ranks=3), 1, 1234)
    assert (ranks["RANK"], ranks["WORLD_SIZE"]) == ("1", "3")
    assert (ranks["MASTER_ADDR"], ranks["MASTER_PORT"]) == ("127.0.0.1", "1234")
    assert ranks["OMP_NUM_THREADS"] == "1"
    alone = environment(make_job("mlp", backend="jax", engine="mpmd", num_ranks=3), 0, 1234)
    assert "WORLD_SIZE" not in alone
    assert alone["XLA_FLAGS"].split() == [
        "--xla_dump_to=here",
        "--xla_force_host_platform_device_count=3",
        "--xla_cpu_multi_thread_eigen=false",
    ]
    assert os.environ["WORLD_SIZE"] == "7"
