"""The peak of memory is that since it was reset."""

import mmap
import sys

import pytest

from plait.compare.memory import peak_bytes, reset_peak

SIZE = 64 * 2**20


def touch(num_bytes: int) -> None:
    """Map memory, write to every page of it, and give it back."""
    with mmap.mmap(-1, num_bytes) as block:
        for page in range(0, num_bytes, mmap.PAGESIZE):
            block[page] = 1


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no way to count anew")
def test_peak_counts_anew_after_a_reset() -> None:
    reset_peak()
    before = peak_bytes()
    touch(SIZE)
    assert peak_bytes() >= before + SIZE // 2
    reset_peak()
    assert peak_bytes() < before + SIZE // 2
