"""What a worker reports, as lines of JSON on its standard output.

progress  what (text), done and total (numbers)
row       row (an object): what one rank measured
training  row (an object)
error     kind (a class), message, expected (whether Plait raised it on purpose), misuse (whether it is in MISUSES)
"""

import json
import os
import sys
from typing import IO, Any

from plait.core_ir.errors import (
    MissingExtraError,
    PartitionError,
    ScheduleError,
    TextError,
    UsageError,
)

MISUSES = (UsageError, ScheduleError, TextError, PartitionError, MissingExtraError)
"""Errors of what was asked for, rather than of what ran."""


class Channel:
    """The worker's end: takes standard output for itself, so that what else is printed goes to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._stream: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, event: str, **fields: Any) -> None:
        """Write one event."""
        print(json.dumps({"event": event, **fields}), file=self._stream, flush=True)


def parse_event(line: str) -> dict[str, Any] | None:
    """The event of a line; None for a line that is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
