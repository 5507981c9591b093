"""Sharing rows of a pool among values that are not alive at the same time: the colouring of intervals."""

import heapq
from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


def colour(intervals: Mapping[Key, tuple[int, int]]) -> tuple[dict[Key, int], int]:
    """A row for each `(birth, death)` interval, and how many rows there are: as many as are alive at once.

    A row is free again for what is born at the time its value dies, since a task reads before it writes.

    >>> colour({"a": (0, 3), "b": (1, 2), "c": (3, 4)})
    ({'a': 0, 'b': 1, 'c': 0}, 2)
    """
    rows: dict[Key, int] = {}
    alive: list[tuple[int, int]] = []
    free: list[int] = []
    num_rows = 0
    for key, (birth, death) in sorted(intervals.items(), key=lambda item: item[1]):
        while alive and alive[0][0] <= birth:
            heapq.heappush(free, heapq.heappop(alive)[1])
        if not free:
            free.append(num_rows)
            num_rows += 1
        rows[key] = heapq.heappop(free)
        heapq.heappush(alive, (death, rows[key]))
    return rows, num_rows
