"""The text form of actions and schedules, printed and parsed back to the same text.

    plait.schedule 1
    name 1f1b
    placement 0 1
    microbatches 2
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

An action is written as torch.distributed.pipelining writes it: stage, kind, microbatch; a pair as
`(0F1;3B0)OVERLAP_F_B`. A message that is not between neighbours names its peer stage: `0SEND_F1>2`,
`2RECV_F1<0`. What belongs to a rank alone has no stage: `OPT`.
"""

import re
from typing import TypeVar

from plait.core_ir.errors import ScheduleError, TextError
from plait.core_ir.schedule.checks import check_is
from plait.core_ir.schedule.ir import Action, ActionTable
from plait.core_ir.schedule.kinds import KINDS, OVERLAP_F_B, ActionKind, B, kind_named

Table = TypeVar("Table", bound=ActionTable)

_HEADER = "plait.schedule 1"
# Longer names first: "F" is no match for the beginning of another name.
_NAMES = "|".join(sorted((k.name for k in KINDS if not k.is_pair), key=len, reverse=True))
# No number of a schedule is longer; `\d` would take the digits of other scripts.
_DIGITS = "[0-9]{1,18}"
_SINGLE = re.compile(rf"({_DIGITS})?({_NAMES})({_DIGITS})?(?:([<>])({_DIGITS}))?")
_PAIR = re.compile(rf"\(({_DIGITS})F({_DIGITS});({_DIGITS})B({_DIGITS})\)OVERLAP_F_B")
_EXPECTED = "expected stage, kind and microbatch as in 0F1, 3I0, 1SEND_F0 or (0F1;3B0)OVERLAP_F_B"


def parse_action(text: str) -> Action:
    """The action that `text` writes. Raises `TextError` saying what was expected."""
    check_is(text, str, "the text of an action", "a str")
    try:
        if pair := _PAIR.fullmatch(text):
            stage_f, microbatch_f, stage_b, microbatch_b = map(int, pair.groups())
            backward = Action(B, stage_b, microbatch_b)
            return Action(OVERLAP_F_B, stage_f, microbatch_f, partner=backward)
        single = _SINGLE.fullmatch(text)
        if single is None:
            raise TextError(f"{text!r} is not an action: {_EXPECTED}")
        stage, name, microbatch, arrow, peer = single.groups()
        kind = kind_named(name)
        return Action(
            kind,
            int(stage) if stage else None,
            int(microbatch) if microbatch else None,
            peer=_peer(kind, stage, arrow, peer),
        )
    except ScheduleError as error:
        raise TextError(f"{text!r} is not an action: {error}") from error


def _peer(kind: ActionKind, stage: str | None, arrow: str | None, peer: str | None) -> int | None:
    if peer is None:
        return int(stage) + kind.peer_offset if kind.is_message and stage else None
    if kind.is_message and arrow != (">" if kind.direction == "send" else "<"):
        raise ScheduleError("a send names its peer with '>', a receive with '<'")
    return int(peer)


def print_schedule(table: ActionTable) -> str:
    """The text form of a schedule."""
    head = [
        _HEADER,
        f"name {table.name}",
        f"placement {' '.join(map(str, table.placement))}",
        f"microbatches {table.num_microbatches}",
    ]
    ranks = (" ".join(map(str, table.rank(rank))) for rank in range(table.num_ranks))
    return "\n".join([*head, *(f"rank {r}: {row}".rstrip() for r, row in enumerate(ranks))]) + "\n"


def parse_schedule(cls: type[Table], text: str) -> Table:
    """The schedule of class `cls` that `text` writes. Raises `TextError` with line and column."""
    check_is(text, str, "the text of a schedule", "a str")
    lines = text.splitlines()
    heads = (_HEADER, "name ", "placement ", "microbatches ")
    for number, head in enumerate(heads):
        line = lines[number] if number < len(lines) else ""
        if not line.startswith(head):
            raise TextError(f"line {number + 1}, column 1: expected {head!r}, got {line!r}")
    name = lines[1].removeprefix("name ")
    placement = [_number(word, 3) for word in lines[2].removeprefix("placement ").split()]
    num_microbatches = _number(lines[3].removeprefix("microbatches "), 4)
    rows = [_parse_row(line, number) for number, line in enumerate(lines[4:])]
    return cls.from_actions(name, placement, num_microbatches, rows)


def _number(word: str, line: int) -> int:
    if not re.fullmatch(_DIGITS, word):
        raise TextError(f"line {line}: expected a number, got {word!r}")
    return int(word)


def _parse_row(line: str, rank: int) -> list[Action]:
    head = f"rank {rank}:"
    where = f"line {rank + 5}"
    if not line.startswith(head):
        raise TextError(f"{where}, column 1: expected {head!r}, got {line!r}")
    actions = []
    for word in re.finditer(r"\S+", line[len(head) :]):
        try:
            actions.append(parse_action(word.group()))
        except TextError as error:
            column = len(head) + word.start() + 1
            raise TextError(f"{where}, column {column}: {error}") from error
    return actions
