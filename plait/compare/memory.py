"""The most memory this process has had at once: resident memory, as the operating system counts it."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak() -> None:
    """Count anew from here, without what earlier work has freed and the allocator still holds.

    Where the system cannot count anew, the peak is that of the whole life of the process.
    """
    gc.collect()
    with suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        _CLEAR.write_text("5")


def peak_bytes() -> int:
    """The peak since `reset_peak`."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
