"""Real text on every machine: the source files of the Python standard library, as bytes.

A file belongs to one split, chosen by a hash of its path: held-out text is never trained on.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Split = Literal["train", "held_out"]
Batch = dict[str, npt.NDArray[np.int32]]

VOCAB_SIZE = 256
HELD_OUT_SHARE = 0.1
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def batches(split: Split, batch_size: int, seq_len: int, seed: int) -> Iterator[Batch]:
    """Endless batches of random windows: {"tokens": i32[B, T], "targets": i32[B, T]}.

    `targets` are the bytes that follow `tokens`. Equal arguments give equal batches.

    Raises:
        ValueError: an unknown split, or a size below one.
    """
    if min(batch_size, seq_len) < 1:
        raise ValueError(f"batch_size and seq_len must be >= 1, got {batch_size} and {seq_len}")
    return _windows(corpus(split), batch_size, seq_len, np.random.default_rng(seed))


@cache
def corpus(split: Split) -> npt.NDArray[np.uint8]:
    """All bytes of a split, read-only, files in the order of their paths."""
    text = b"\n".join((_root() / name).read_bytes() for name in files(split))
    return np.frombuffer(text, np.uint8)


@cache
def files(split: Split) -> tuple[str, ...]:
    """The paths of a split's files, relative to the standard library, sorted."""
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}; there are {', '.join(get_args(Split))}")
    root = _root()
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if SKIPPED_FOLDERS.isdisjoint(path.parts))
    return tuple(name for name in names if _is_held_out(name) == (split == "held_out"))


def _root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def _windows(
    text: npt.NDArray[np.uint8], batch_size: int, seq_len: int, rng: np.random.Generator
) -> Iterator[Batch]:
    offsets = np.arange(seq_len + 1)
    while True:
        starts = rng.integers(0, len(text) - seq_len, size=(batch_size, 1))
        window = text[starts + offsets].astype(np.int32)
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}
