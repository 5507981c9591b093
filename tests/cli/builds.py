"""What tests give `plait compare` as `builds:<name>`: a model that works, and every way to fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[Any, nn.Module, Tensor]


def working() -> Built:
    """A small regression of one stage."""
    torch.manual_seed(0)
    return _loss, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 4)


def raising() -> Built:
    """An error of the user's own."""
    _note_processes()
    print("about to fail", file=sys.stderr)
    raise ValueError("no such data set")


def raising_at_once() -> Built:
    """As `raising`, with nothing started before."""
    raise ValueError("no such\ndata set")


def exiting() -> Built:
    """Rank 1 ends without a word; rank 0 goes on and waits for it."""
    _note_processes()
    if os.environ["RANK"] == "1":
        os._exit(3)
    return working()


def killed() -> Built:
    """The process dies of a signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def hanging() -> Built:
    """Nothing is ever heard again."""
    _note_processes()
    time.sleep(1000)
    raise AssertionError("not reached")


def waiting() -> Built:
    """As `hanging`, without a process of its own."""
    _note(os.getpid())
    time.sleep(1000)
    raise AssertionError("not reached")


def no_triple() -> Any:
    """Not what a build returns."""
    return _loss


def needing(rows: int, width: int = 4) -> Built:
    """Called with nothing, this cannot be."""
    return working()


def not_a_number() -> Built:
    """A loss that is NaN in the framework itself."""
    loss_fn, model, batch = working()
    return loss_fn, model, batch * float("nan")


def uneven() -> Built:
    """A batch that two microbatches do not divide."""
    loss_fn, model, batch = working()
    return loss_fn, model, batch[:7]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def _note_processes() -> None:
    """Write the ids of this process and of one that it starts."""
    _note(os.getpid())
    _note(subprocess.Popen(["sleep", "1000"]).pid)


def _note(pid: int) -> None:
    (Path(os.environ["PROCESS_IDS"]) / str(pid)).touch()
