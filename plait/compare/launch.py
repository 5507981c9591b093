"""The processes of a job: started, listened to, and ended, whatever happens.

Each is the leader of a session of its own, so that it ends together with all it has started.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from plait.compare.events import parse_event
from plait.compare.job import Job
from plait.core_ir.errors import ExecutionError, PlaitError, UsageError

Listener = Callable[[int, dict[str, Any]], None]
"""Called with rank and event."""

TAIL_LINES = 20
GRACE_SECONDS = 2.0
"""For the others to say what they saw, once one has failed."""


@dataclass
class Worker:
    """One process; `tail` holds the last lines it wrote to standard error."""

    rank: int
    process: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    readers: list[threading.Thread] = field(default_factory=list)
    error: dict[str, Any] | None = None
    code: int | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it reported an error or ended badly."""
        return self.error is not None or self.code not in (None, 0)


def run_job(job: Job, listen: Listener, *, timeout: float) -> None:
    """Run the processes of a job to their end; `listen` hears their events as they come.

    Once every process has ended: raises UsageError if one says that the job cannot be run as it was asked for;
    ExecutionError if one fails otherwise, is killed, or if for `timeout` seconds none of them says anything.
    """
    with _started(job) as workers:
        _listen(job, workers, listen, timeout)


def environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """The variables of a worker: one thread a rank, as many host devices as ranks, a process group's address."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    ours = {
        "--xla_force_host_platform_device_count": str(job.num_devices),
        "--xla_cpu_multi_thread_eigen": "false",
    }
    users = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in users if flag.partition("=")[0] not in ours]
    variables["XLA_FLAGS"] = " ".join([*flags, *map("=".join, ours.items())])
    group = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if job.num_processes > 1:
        return {**variables, **group}
    return {name: value for name, value in variables.items() if name not in group}


@contextmanager
def _started(job: Job) -> Iterator[list[Worker]]:
    port = _free_port()
    workers: list[Worker] = []
    try:
        for rank in range(job.num_processes):
            workers.append(_start(job, rank, environment(job, rank, port)))
        yield workers
    finally:
        for worker in workers:
            _end(worker)


def _start(job: Job, rank: int, variables: Mapping[str, str]) -> Worker:
    process = subprocess.Popen(
        [sys.executable, "-m", "plait.compare.worker"],
        env=dict(variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: its exit code will say so
        print(job.to_json(), file=process.stdin, flush=True)
    return Worker(rank, process)


def _end(worker: Worker) -> None:
    """Kill the process and all of its session; close its pipes."""
    process = worker.process
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for reader in worker.readers:
        reader.join(timeout=GRACE_SECONDS)
    # A pipe still read is held open by something that left the session: closing it would wait for that.
    reading = any(reader.is_alive() for reader in worker.readers)
    for stream in (process.stdin, *(() if reading else (process.stdout, process.stderr))):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listen(job: Job, workers: list[Worker], listen: Listener, timeout: float) -> None:
    events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    for worker in workers:
        _read(worker, events)
    deadline = time.monotonic() + timeout
    failing = False
    while any(worker.code is None for worker in workers):
        try:
            rank, event = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        worker = workers[rank]
        if event["event"] == "exit":
            worker.code = event["code"]
        elif event["event"] == "error":
            worker.error = event
        else:
            listen(rank, event)
        if not failing:
            failing = worker.has_failed
            deadline = time.monotonic() + (GRACE_SECONDS if failing else timeout)
    if any(worker.code != 0 or worker.error for worker in workers):
        raise _failure(job, workers, timeout)


def _read(worker: Worker, events: "queue.Queue[tuple[int, dict[str, Any]]]") -> None:
    """Follow a process in threads: its events, its standard error, its end."""
    process = worker.process
    assert process.stdout is not None
    assert process.stderr is not None
    errors = threading.Thread(target=_keep_tail, args=(process.stderr, worker.tail), daemon=True)

    def follow(stream: IO[str]) -> None:
        for line in stream:
            event = parse_event(line)
            if event is not None:
                events.put((worker.rank, event))
        code = process.wait()
        errors.join(timeout=GRACE_SECONDS)
        events.put((worker.rank, {"event": "exit", "code": code}))

    worker.readers += [
        errors,
        threading.Thread(target=follow, args=(process.stdout,), daemon=True),
    ]
    for reader in worker.readers:
        reader.start()


def _keep_tail(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        tail.append(line.rstrip("\n"))


def _failure(job: Job, workers: list[Worker], timeout: float) -> PlaitError:
    """What went wrong first: a rank that ended without a word takes others with it, so it is named before them."""
    silent = [w for w in workers if w.error is None and w.code not in (None, 0)]
    spoken = [w for w in workers if w.error is not None]
    if not silent and not spoken:
        waiting = ", ".join(str(w.rank) for w in workers if w.code is None)
        tail = next((w.tail for w in workers if w.code is None and w.tail), deque())
        reason = f"nothing was heard for {timeout:.0f} s of rank {waiting}; it was ended"
        return _with_tail(f"{job.name}: {reason}", tail)
    worker = [*silent, *spoken][0]
    where = f"{job.name}, rank {worker.rank}" if job.num_processes > 1 else job.name
    if worker.error is None:
        assert worker.code is not None
        how = (
            f"was killed by {signal.Signals(-worker.code).name}"
            if worker.code < 0
            else f"exited with code {worker.code}"
        )
        return _with_tail(f"{where}: the process {how}", worker.tail)
    if worker.error["expected"]:
        kind = UsageError if worker.error["misuse"] else ExecutionError
        return kind(f"{where}: {worker.error['message']}")
    return _with_tail(f"{where}: {worker.error['kind']}: {worker.error['message']}", worker.tail)


def _with_tail(message: str, tail: deque[str]) -> ExecutionError:
    lines = ["its last lines:", *(f"  {line}" for line in tail)] if tail else []
    return ExecutionError("\n".join([message, *lines]))
