"""Checks of what a caller gives: each error says what was expected and what was found."""

import math
import operator
from collections.abc import Iterable
from types import UnionType
from typing import Any, TypeVar

from plait.core_ir.errors import ScheduleError

Value = TypeVar("Value")

# Eight times the largest schedule that is timed by the benchmarks; its arrays take some gigabytes.
MOST_TASKS = 2**26
# What the columns of a table can hold.
_MOST = 2**31 - 1


def checked_count(value: Any, what: str, least: int = 1) -> int:
    """`value` as an int, `least` or more. NumPy's integers are integers; a bool is none."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ScheduleError(f"{what} must be an integer, got {value!r}")
    if number < least:
        raise ScheduleError(f"{what} must be {least} or more, got {number}")
    if number > _MOST:
        raise ScheduleError(
            f"{what} must be {_MOST} or less, got a number of {number.bit_length()} bits"
        )
    return number


def checked_limit(value: Any) -> float | None:
    """A memory limit as a float, infinity included; None for none."""
    if value is None:
        return None
    try:
        limit = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        limit = math.nan
    if math.isnan(limit):
        raise ScheduleError(f"memory_limit must be a number or None, got {value!r}")
    return limit


def checked_list(values: Iterable[Value], what: str) -> list[Value]:
    """What `values` yields."""
    try:
        return list(values)
    except TypeError:
        raise ScheduleError(f"{what} must be a sequence, got {values!r}") from None


def check_is(value: object, kind: type | UnionType, what: str, expected: str) -> None:
    """Raise `ScheduleError` unless `value` is of `kind`, which `expected` puts into words."""
    if not isinstance(value, kind):
        raise ScheduleError(f"{what} must be {expected}, got {value!r}")


def check_size(num_stages: int, num_microbatches: int, reason: str = "") -> None:
    """Raise `ScheduleError` where F, I and W of all microbatches are more tasks than can be held.

    `reason` says why there are more microbatches than were asked for, if so.
    """
    num_tasks = 3 * num_stages * num_microbatches
    if num_tasks > MOST_TASKS:
        raise ScheduleError(
            f"{counted(num_stages, 'stage')} and {counted(num_microbatches, 'microbatch')}{reason} make"
            f" {num_tasks} tasks; a schedule has at most {MOST_TASKS}: take fewer ranks or microbatches"
        )


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
