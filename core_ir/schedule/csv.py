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
from plait.core_ir.schedule.text import parse_action

Table = TypeVar("Table", bound=ActionTable)


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
    for a stage that runs on two ranks or on none, or a file that cannot be read.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: no schedule can be read: {error}") from error
    ranks = [_parse_row(path, number, row) for number, row in enumerate(rows, start=1)]
    placement = _placement(path, ranks)
    microbatches = [
        part.microbatch
        for row in ranks
        for action in row
        for part in action.parts
        if part.microbatch is not None
    ]
    return cls.from_actions(Path(path).stem, placement, max(microbatches) + 1, ranks)


def _parse_row(path: str | PathLike[str], number: int, row: list[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(row, start=1):
        if not cell.strip():
            continue
        try:
            actions.append(parse_action(cell.strip()))
        except TextError as error:
            raise TextError(f"{path}, row {number}, column {column}: {error}") from error
    return actions


def _placement(path: str | PathLike[str], ranks: list[list[Action]]) -> list[int]:
    placed: dict[int, int] = {}
    for rank, row in enumerate(ranks):
        for action in row:
            for part in action.parts:
                if part.stage is None or not part.kind.is_compute:
                    continue
                if placed.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{path}, row {rank + 1}: {action} is on rank {rank}, but stage"
                        f" {part.stage} already runs on rank {placed[part.stage]}"
                    )
    if not placed:
        raise ScheduleError(f"{path}: no schedule can be read: there is no task in it")
    missing = sorted(set(range(max(placed) + 1)) - set(placed))
    if missing:
        raise ScheduleError(f"{path}: no rank runs a task of stage {missing[0]}")
    return [placed[stage] for stage in range(len(placed))]
