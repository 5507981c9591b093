"""A worker's reports stay apart from what else its process prints."""

import subprocess
import sys

from plait.compare.events import parse_event

SCRIPT = """
import os, sys
from plait.compare.events import Channel
channel = Channel()
print("hello from a model")
os.system("echo hello from a child")
channel.send("progress", what="compiling", done=0, total=2)
"""


def test_standard_output_holds_events_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert parse_event(line) == {"event": "progress", "what": "compiling", "done": 0, "total": 2}
    assert sorted(done.stderr.splitlines()) == ["hello from a child", "hello from a model"]


def test_lines_that_are_no_events_are_passed_over() -> None:
    for line in ("", "hello", "[1, 2]", '{"row": 1}', '{"event": 3}', '{"event": "row"'):
        assert parse_event(line) is None
