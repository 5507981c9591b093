"""CSV files as torch.distributed.pipelining writes and reads them: a row a rank, a cell an action.

Empty cells, which that library uses for idle steps, are skipped; a rank that runs nothing has a row
of one empty cell, `""`. Compute-only and lowered schedules are both read. Cells that only Plait knows
(`OPT`, messages to a stage that is no neighbour) are kept.
"""

import csv
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TypeVar

import numpy as np

from plait.core_ir.errors import ScheduleError, TextError, UsageError
from plait.core_ir.schedule.checks import check_is
from plait.core_ir.schedule.ir import Action, ActionTable, Cells
from plait.core_ir.schedule.kinds import B, F, I
from plait.core_ir.schedule.text import parse_action

Table = TypeVar("Table", bound=ActionTable)
# The actions of a row by column.
Row = dict[int, Action]
Microbatches = set[int | None]

_TORCH_1F1B = (
    " (torch.distributed.pipelining 2.13 exports Schedule1F1B so: forwards of the last stage numbered"
    " from 1. Build '1f1b' here instead.)"
)


def write_csv(table: ActionTable, path: str | PathLike[str]) -> None:
    """Write the schedule to `path`. Raises `UsageError` where that cannot be written."""
    check_is(path, str | PathLike, "the file of a schedule", "a path")
    rows = [[str(action) for action in table.rank(rank)] for rank in range(table.num_ranks)]
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(row or [""] for row in rows)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def read_csv(cls: type[Table], path: str | PathLike[str]) -> Table:
    """The schedule of class `cls` in the file at `path`, named by the file.

    A stage is placed on the rank that runs its tasks; stages and microbatches are counted from 0
    to the largest there. The result is well formed, not yet validated; when it is, errors name row
    and column of the file.

    Raises `TextError` naming file, row and column of a cell that is no action, and `ScheduleError`
    for a blank line between rows, a task done twice, a stage that runs on two ranks or on none, a
    forward or a backward without the other (unless there are no backwards), or a file that cannot be
    read.
    """
    check_is(path, str | PathLike, "the file of a schedule", "a path")
    try:
        # With or without the mark that some editors and spreadsheets put first.
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ScheduleError(f"{path}: no schedule can be read: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    cells = [_parse_row(path, number, row) for number, row in enumerate(rows, start=1)]
    placement = _placement(path, cells)
    for number, row in enumerate(cells, start=1):
        _check_once(path, number, row)
        _check_backwards(path, number, row, is_last=number == len(cells))
    num_microbatches = _count_microbatches(path, cells)
    ranks = [list(row.values()) for row in cells]
    table = cls.from_actions(Path(path).stem, placement, num_microbatches, ranks)
    columns = np.array([column for row in cells for column in row], dtype=np.int64)
    return replace(table, cells=Cells(str(path), columns))


def _parse_row(path: str | PathLike[str], number: int, row: list[str]) -> Row:
    if not row:
        raise ScheduleError(
            f'{path}, row {number} is blank; a rank that runs nothing is written "", and no other row is'
        )
    actions = {}
    for column, cell in enumerate(row, start=1):
        if not cell.strip():
            continue
        try:
            actions[column] = parse_action(cell.strip())
        except TextError as error:
            raise TextError(f"{path}, row {number}, column {column}: {error}") from error
    return actions


def _check_once(path: str | PathLike[str], number: int, row: Row) -> None:
    seen: dict[Action, int] = {}
    for column, action in row.items():
        for part in action.parts:
            if part.kind.is_compute and seen.setdefault(part, column) != column:
                raise ScheduleError(
                    f"{path}, row {number}, column {column}: {part} is done in column {seen[part]}"
                    " already; each task must be done once"
                )


def _check_backwards(path: str | PathLike[str], number: int, row: Row, *, is_last: bool) -> None:
    """Where a stage has backwards at all, they must be of the microbatches of its forwards."""
    tasks = [(column, part) for column, action in row.items() for part in action.parts]
    for stage in sorted({part.stage for _, part in tasks if part.kind in (B, I)}, key=str):
        of_stage = [(column, part) for column, part in tasks if part.stage == stage]
        forwards = {part.microbatch for _, part in of_stage if part.kind is F}
        backwards = {part.microbatch for _, part in of_stage if part.kind in (B, I)}
        for column, part in of_stage:
            if part.kind is F and part.microbatch not in backwards:
                lacks = "backward"
            elif part.kind in (B, I) and part.microbatch not in forwards:
                lacks = "forward"
            else:
                continue
            raise ScheduleError(
                f"{path}, row {number}, column {column}: {part} has no {lacks}: the forwards of"
                f" stage {stage} are of microbatches {_span(forwards)}, its backwards of"
                f" {_span(backwards)}; each microbatch needs both."
                f"{_TORCH_1F1B if is_last and _is_late_by_one(forwards, backwards) else ''}"
            )


def _is_late_by_one(forwards: Microbatches, backwards: Microbatches) -> bool:
    return forwards == {number + 1 for number in backwards if number is not None}


def _span(microbatches: Microbatches) -> str:
    numbers = sorted(number for number in microbatches if number is not None)
    if not numbers:
        return "none"
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _count_microbatches(path: str | PathLike[str], rows: list[Row]) -> int:
    """The number of microbatches, each of which has a cell in every row that runs anything."""
    most = max(map(len, rows), default=0)
    largest = 0
    for number, row in enumerate(rows, start=1):
        for column, action in row.items():
            for part in action.parts:
                if part.microbatch is not None and part.microbatch >= 2 * most:
                    raise ScheduleError(
                        f"{path}, row {number}, column {column}: {action} is of microbatch"
                        f" {part.microbatch}, but no row has more than {most} actions; microbatches"
                        " are counted from 0"
                    )
                largest = max(largest, part.microbatch or 0)
    return largest + 1


def _placement(path: str | PathLike[str], rows: list[Row]) -> list[int]:
    placed: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for column, action in row.items():
            for part in action.parts:
                if part.stage is None or not part.kind.is_compute:
                    continue
                if placed.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{path}, row {rank + 1}, column {column}: {action} is on rank {rank}, but"
                        f" stage {part.stage} already runs on rank {placed[part.stage]}"
                    )
    if not placed:
        raise ScheduleError(f"{path}: no schedule can be read: there is no task in it")
    missing = sorted(set(range(min(max(placed) + 1, len(placed) + 1))) - set(placed))
    if missing:
        raise ScheduleError(
            f"{path}: no rank runs a task of stage {missing[0]}, but one of stage {max(placed)};"
            " stages are counted from 0"
        )
    return [placed[stage] for stage in range(len(placed))]
