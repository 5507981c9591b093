"""Orders told without microbatch numbers: a stage runs its microbatches in turn, so counting gives
them.

A rank's order is a sequence of turns: (kind, stage), or (OVERLAP_F_B, forward stage, backward
stage) for a pair.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import ActionKind

Turn = tuple[ActionKind, int] | tuple[ActionKind, int, int]


def table_from_turns(
    name: str,
    placement: Sequence[int],
    num_microbatches: int,
    rows: Sequence[Iterable[Turn]],
) -> ActionTable:
    """A table from each rank's turns, numbered.

    Turns beyond `num_microbatches` are dropped, so an order for more microbatches, as some patterns
    need, gives one for fewer: what is left waits for nothing that was dropped.
    """
    numbered = [_number(row, num_microbatches) for row in rows]
    offsets = np.cumsum([0, *(len(row) for row in numbered)])
    flat = [entry for row in numbered for entry in row]
    columns = np.array(flat, dtype=np.int64).reshape(len(flat), 5).T
    return ActionTable(name, tuple(placement), len(rows), num_microbatches, offsets, *columns)


def _number(row: Iterable[Turn], num_microbatches: int) -> list[tuple[int, int, int, int, int]]:
    """Entries kind, stage, microbatch, other stage, other microbatch of one rank."""
    forwards: Counter[int] = Counter()
    input_gradients: Counter[int] = Counter()
    weight_gradients: Counter[int] = Counter()
    entries = []
    for kind, stage, *rest in row:
        backward = rest[0] if rest else stage
        microbatch = other = -1
        if kind.weight_gradient:
            microbatch = other = weight_gradients[backward]
            weight_gradients[backward] += 1
        if kind.input_gradient:
            microbatch = other = input_gradients[backward]
            input_gradients[backward] += 1
        if kind.forward:
            microbatch = forwards[stage]
            forwards[stage] += 1
        if microbatch >= num_microbatches:
            continue
        pair = (backward, other) if rest else (-1, -1)
        entries.append((kind.code, stage, microbatch, *pair))
    return entries
