"""Callables behind `extern` equations whose framework cannot find them by name: a table of this process.

A frontend registers, the backend of the same framework looks up. A program read from text in another process has no
such callables, and says so.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from plait.core_ir.errors import UnsupportedError

Call: TypeAlias = Callable[..., tuple[Any, ...]]
"""Takes and returns arrays of its framework."""

_CALLS: dict[tuple[str, str], Call] = {}


def register(target: str, spec: str, call: Call) -> None:
    """Make `call` what an extern of this target and spec does; the first one registered stays."""
    _CALLS.setdefault((target, spec), call)


def lookup(target: str, spec: str) -> Call:
    """The callable of an extern; UnsupportedError when this process has none."""
    try:
        return _CALLS[target, spec]
    except KeyError:
        raise UnsupportedError(
            f"extern {target!r} was captured in another process, and its callable is not known in this one; "
            "capture the model here"
        ) from None
