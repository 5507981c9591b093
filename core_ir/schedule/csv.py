"""CSV files as torch.distributed.pipelining writes and reads them: a row a rank, a cell an action.

Empty cells, which that library uses for idle steps, are skipped. Compute-only and lowered
schedules are both read. Cells that only Plait knows (`OPT`, messages to a stage that is no
neighbour) are kept.
"""

import csv
from os import PathLike
from pathlib import Path
from typing import TypeVar

from plait.core_ir.errors import ScheduleError, TextError
from plait.core_ir.schedule.ir import Action, ActionTable
from plait.core_ir.schedule.kinds import B, F, I
from plait.core_ir.schedule.text import parse_action

Table = TypeVar("Table", bound=ActionTable)
# The actions of a row by column.
Row = dict[int, Action]


def write_csv(table: ActionTable, path: str | PathLike[str]) -> None:
    """Write the schedule to `path`."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for rank in range(table.num_ranks):
            writer.writerow(map(str, table.rank(rank)))


def read_csv(cls: type[Table], path: str | PathLike[str]) -> Table:
    """The schedule of class `cls` in the file at `path`, named by the file.

    A stage is placed on the rank that runs its tasks; stages and microbatches are counted from 0
    to the largest there. The result is well formed, not yet validated.

    Raises `TextError` naming file, row and column of a cell that is no action, and `ScheduleError`
    for a stage that runs on two ranks or on none, a forward or a backward without the other (unless
    there are no backwards), or a file that cannot be read.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: no schedule can be read: {error}") from error
    cells = [_parse_row(path, number, row) for number, row in enumerate(rows, start=1)]
    placement = _placement(path, cells)
    for number, row in enumerate(cells, start=1):
        _check_backwards(path, number, row)
    num_microbatches = _count_microbatches(path, cells)
    ranks = [list(row.values()) for row in cells]
    return cls.from_actions(Path(path).stem, placement, num_microbatches, ranks)


def _parse_row(path: str | PathLike[str], number: int, row: list[str]) -> Row:
    actions = {}
    for column, cell in enumerate(row, start=1):
        if not cell.strip():
            continue
        try:
            actions[column] = parse_action(cell.strip())
        except TextError as error:
            raise TextError(f"{path}, row {number}, column {column}: {error}") from error
    return actions


def _check_backwards(path: str | PathLike[str], number: int, row: Row) -> None:
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
                f" {_span(backwards)}; each microbatch needs both. (torch.distributed.pipelining"
                " 2.13 exports Schedule1F1B so: forwards of the last stage numbered from 1. Build"
                " '1f1b' here instead.)"
            )


def _span(microbatches: set[int | None]) -> str:
    numbers = sorted(number for number in microbatches if number is not None)
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _count_microbatches(path: str | PathLike[str], rows: list[Row]) -> int:
    """The number of microbatches, each of which has a cell in every row that runs anything."""
    most = max(map(len, rows))
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
