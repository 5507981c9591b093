"""Schedules as plain data: `Action`, one entry, and `ActionTable`, every rank's actions as arrays.

The arrays of all ranks lie one after the other: rank `r` owns `offsets[r]:offsets[r + 1]`, and the
index into them names an action in every pass over schedules. `Action` objects are made on access.

NOTE: passes (validate, lower, simulate, ...) are functions over `ActionTable`; the public
`Schedule` extends it with methods that call them, and stands above them all. So nothing here knows
a pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import (
    check_is,
    check_size,
    checked_count,
    checked_list,
    counted,
)
from plait.core_ir.schedule.kinds import (
    HAS_MICROBATCH,
    HAS_STAGE,
    IS_MESSAGE,
    KINDS,
    OVERLAP_F_B,
    ActionKind,
    B,
    F,
)

IntArray = NDArray[np.int64]
Column = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    `peer` is the other stage of a message; `partner` the backward half of an overlapped pair.
    """

    kind: ActionKind
    stage: int | None = None
    microbatch: int | None = None
    peer: int | None = None
    partner: "Action | None" = None

    def __post_init__(self) -> None:
        kind = self.kind
        check_is(kind, ActionKind, "the kind of an action", "one of KINDS")
        for given, expected, what in (
            (self.stage, kind.has_stage, "a stage"),
            (self.microbatch, kind.has_microbatch, "a microbatch"),
            (self.peer, kind.is_message, "a peer stage"),
            (self.partner, kind.is_pair, "a partner"),
        ):
            if (given is not None) != expected:
                verb = "needs" if expected else "takes no"
                noun = what if expected else what.split(" ", 1)[1]
                raise ScheduleError(f"a {kind} action {verb} {noun}, got {given}")
        for column in ("stage", "microbatch", "peer"):
            given = getattr(self, column)
            if given is not None:
                number = checked_count(given, f"the {column} of a {kind} action", least=0)
                object.__setattr__(self, column, number)
        if self.partner is not None and getattr(self.partner, "kind", None) is not B:
            raise ScheduleError(f"the partner of {kind} must be a B action, got {self.partner}")

    @property
    def parts(self) -> tuple["Action", ...]:
        """The actions this one stands for: (F, B) of an overlapped pair, else itself alone."""
        if self.partner is None:
            return (self,)
        return (Action(F, self.stage, self.microbatch), self.partner)

    def __str__(self) -> str:
        kind = self.kind
        if self.partner is not None:
            return f"({self.stage}F{self.microbatch};{self.partner}){kind}"
        stage = "" if self.stage is None else str(self.stage)
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        peer = ""
        if self.stage is not None and self.peer not in (None, self.stage + kind.peer_offset):
            peer = f"{'>' if kind.direction == 'send' else '<'}{self.peer}"
        return f"{stage}{kind}{microbatch}{peer}"

    def __repr__(self) -> str:
        return f"<Action {self}>"


class Cells(NamedTuple):
    """Where actions were read: the file, and for each action its column there, from 1; a row a rank."""

    file: str
    column: IntArray


@dataclass(frozen=True, eq=False)
class ActionTable:
    """Every rank's actions, in order. Frozen, and its arrays are read-only.

    `placement[s]` is the rank of stage `s`. `stage` and `microbatch` are -1 where the kind has
    none. `other_stage` is the peer stage of a message and, with `other_microbatch`, the backward
    half of an overlapped pair; else -1. `cells` says where the actions stand in the file they come
    from, if any. Two tables are equal when they hold the same actions on the same placement,
    whatever their names.

    Raises `ScheduleError` for arrays that do not fit each other, and for actions outside the
    stages or microbatches.
    """

    name: str
    placement: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    offsets: IntArray = field(repr=False)
    kind: Column = field(repr=False)
    stage: Column = field(repr=False)
    microbatch: Column = field(repr=False)
    other_stage: Column = field(repr=False)
    other_microbatch: Column = field(repr=False)
    cells: Cells | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        placed = (
            checked_count(r, f"the rank of stage {s}", 0) for s, r in enumerate(self.placement)
        )
        object.__setattr__(self, "placement", tuple(placed))
        microbatches = checked_count(self.num_microbatches, "num_microbatches", least=0)
        object.__setattr__(self, "num_microbatches", microbatches)
        for column, dtype in (("offsets", np.int64), ("kind", np.int8)):
            _freeze(self, column, dtype)
        for column in ("stage", "microbatch", "other_stage", "other_microbatch"):
            _freeze(self, column, np.int32)
        _check_sizes(self)
        _check_entries(self)

    @classmethod
    def from_actions(
        cls,
        name: str,
        placement: Sequence[int],
        num_microbatches: int,
        rows: Sequence[Iterable[Action]],
    ) -> Self:
        """A table from each rank's actions in order."""
        lists = [checked_list(row, "the actions of a rank") for row in checked_list(rows, "rows")]
        entries = [[_entry(action) for action in row] for row in lists]
        flat = [entry for row in entries for entry in row]
        columns = np.array(flat, dtype=np.int64).reshape(len(flat), 5).T
        offsets = np.cumsum([0, *(len(row) for row in entries)])
        placed = tuple(checked_list(placement, "placement"))
        return cls(name, placed, len(entries), num_microbatches, offsets, *columns)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_actions(self) -> int:
        return len(self.kind)

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(stage of the forward, stage of the backward) of every overlapped pair."""
        is_pair = self.kind == OVERLAP_F_B.code
        stages = zip(self.stage[is_pair].tolist(), self.other_stage[is_pair].tolist(), strict=True)
        return frozenset(stages)

    @property
    def is_lowered(self) -> bool:
        """True when the table holds messages."""
        return bool(IS_MESSAGE[self.kind].any())

    @cached_property
    def rank_of_action(self) -> IntArray:
        """The rank of every action, by index; read-only."""
        ranks = np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))
        ranks.setflags(write=False)
        return ranks

    def rank(self, rank: int) -> tuple[Action, ...]:
        """The actions of `rank`, in order."""
        own = self.rows_of(rank)
        return tuple(self.action(index) for index in range(own.start, own.stop))

    def rows_of(self, rank: int) -> slice:
        """Where the actions of `rank` stand in the arrays."""
        rank = checked_count(rank, "rank", least=0)
        if rank >= self.num_ranks:
            raise ScheduleError(
                f"rank {rank} is not one of the {counted(self.num_ranks, 'rank')} of {self.name!r}"
            )
        return slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def action(self, index: int) -> Action:
        """The action at `index` of the arrays."""
        kind = KINDS[self.kind[index]]
        stage = int(self.stage[index]) if kind.has_stage else None
        microbatch = int(self.microbatch[index]) if kind.has_microbatch else None
        other = int(self.other_stage[index])
        if kind.is_pair:
            partner = Action(B, other, int(self.other_microbatch[index]))
            return Action(kind, stage, microbatch, partner=partner)
        return Action(kind, stage, microbatch, peer=other if kind.is_message else None)

    def where(self, index: int) -> str:
        """`rank 1, position 4: 2F0`, or `mine.csv, row 2, column 5: 2F0` of a file, for errors."""
        rank = int(np.searchsorted(self.offsets, index, side="right")) - 1
        if self.cells is not None:
            file, column = self.cells
            return f"{file}, row {rank + 1}, column {column[index]}: {self.action(index)}"
        return f"rank {rank}, position {index - self.offsets[rank]}: {self.action(index)}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ActionTable):
            return NotImplemented
        return self._sizes() == other._sizes() and all(
            np.array_equal(getattr(self, column), getattr(other, column))
            for column in (
                "offsets",
                "kind",
                "stage",
                "microbatch",
                "other_stage",
                "other_microbatch",
            )
        )

    def __hash__(self) -> int:
        return hash((self._sizes(), self.kind.tobytes(), self.microbatch.tobytes()))

    def _sizes(self) -> tuple[object, ...]:
        return (self.placement, self.num_ranks, self.num_microbatches, self.num_actions)


def _entry(action: Action) -> tuple[int, int, int, int, int]:
    check_is(action, Action, "an entry of a schedule", "an Action")
    stage = -1 if action.stage is None else action.stage
    microbatch = -1 if action.microbatch is None else action.microbatch
    if action.partner is not None:
        _, stage_b, microbatch_b, _, _ = _entry(action.partner)
        return (action.kind.code, stage, microbatch, stage_b, microbatch_b)
    return (action.kind.code, stage, microbatch, -1 if action.peer is None else action.peer, -1)


def _freeze(table: ActionTable, column: str, dtype: type[np.integer[Any]]) -> None:
    values = np.array(getattr(table, column), dtype=dtype)
    values.setflags(write=False)
    object.__setattr__(table, column, values)


def _check_sizes(table: ActionTable) -> None:
    check_is(table.name, str, "the name of a schedule", "a str")
    if len(f"{table.name}.".splitlines()) > 1:
        raise ScheduleError(f"the name of a schedule must be one line, got {table.name!r}")
    if table.num_ranks < 1 or table.num_microbatches < 1 or not table.placement:
        raise ScheduleError(
            f"schedule {table.name!r} needs at least one rank, stage and microbatch, got"
            f" {counted(table.num_ranks, 'rank')}, {counted(table.num_stages, 'stage')} and"
            f" {counted(table.num_microbatches, 'microbatch')}"
        )
    check_size(table.num_stages, table.num_microbatches)
    for stage, rank in enumerate(table.placement):
        if rank >= table.num_ranks:
            raise ScheduleError(
                f"stage {stage} is placed on rank {rank}, but schedule {table.name!r} has"
                f" {counted(table.num_ranks, 'rank')}"
            )
    columns = (table.kind, table.stage, table.microbatch, table.other_stage, table.other_microbatch)
    lengths = {column.shape for column in columns}
    offsets = table.offsets
    fits = (
        offsets.shape == (table.num_ranks + 1,)
        and offsets[0] == 0
        and (np.diff(offsets) >= 0).all()
    )
    if lengths != {(table.num_actions,)} or not fits or offsets[-1] != table.num_actions:
        raise ScheduleError(
            f"the arrays of schedule {table.name!r} do not fit each other: {lengths}, {offsets}"
        )


def _check_entries(table: ActionTable) -> None:
    if ((table.kind < 0) | (table.kind >= len(KINDS))).any():
        raise ScheduleError(f"schedule {table.name!r} holds unknown kind codes")
    is_pair = table.kind == OVERLAP_F_B.code
    has_other = is_pair | IS_MESSAGE[table.kind]
    for column, used, limit, what in (
        (table.stage, HAS_STAGE[table.kind], table.num_stages, "stages"),
        (table.microbatch, HAS_MICROBATCH[table.kind], table.num_microbatches, "microbatches"),
        (table.other_stage, has_other, table.num_stages, "stages"),
        (table.other_microbatch, is_pair, table.num_microbatches, "microbatches"),
    ):
        wrong = np.flatnonzero(np.where(used, (column < 0) | (column >= limit), column != -1))
        if wrong.size:
            raise ScheduleError(f"{table.where(int(wrong[0]))} is outside the {limit} {what}")
