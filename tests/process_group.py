"""Starting ranks as torchrun does, with a watchdog: a hang is a failure."""

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WATCHDOG_SECONDS = 240


@dataclass(frozen=True)
class Finished:
    """What one rank left: its exit status and what it printed."""

    status: int
    stdout: str
    stderr: str


def run_ranks(
    script: Path, arguments: list[str], num_ranks: int, watchdog: float = WATCHDOG_SECONDS
) -> list[Finished]:
    """Run `script` on each of some gloo ranks; AssertionError where one does not end in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(num_ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            out, err = (Path(folder, f"{rank}.{kind}") for kind in ("out", "err"))
            with out.open("w") as stdout, err.open("w") as stderr:
                command = [sys.executable, str(script), *arguments]
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)
                )
        try:
            for process in processes:
                process.wait(watchdog)
        except subprocess.TimeoutExpired:
            tails = [Path(folder, f"{r}.err").read_text()[-2000:] for r in range(num_ranks)]
            raise AssertionError(f"a rank did not end in {watchdog} s: {tails}") from None
        finally:
            for process in processes:
                process.kill()
        return [
            Finished(
                process.returncode,
                Path(folder, f"{rank}.out").read_text(),
                Path(folder, f"{rank}.err").read_text(),
            )
            for rank, process in enumerate(processes)
        ]
