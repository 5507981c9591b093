"""Several stages a rank, placed round and round.

Interleaved 1F1B: Narayanan et al., arXiv 2104.04473, section 2.2; also with the weight gradients
of ZB-H1 in its bubble. Breadth-first: Lamy-Poirier, arXiv 2211.05953.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from plait.core_ir.schedule.checks import check_size
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import B, F, I, W
from plait.core_ir.schedule.placement import loop
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.turns import Turn, table_from_turns


def _build_1f1b(request: Request) -> ActionTable:
    return _build_lagged("interleaved-1f1b", request, split=False)


def _build_zb(request: Request) -> ActionTable:
    return _build_lagged("interleaved-zb", request, split=True)


def _build_bfs(request: Request) -> ActionTable:
    rows = []
    for rank in range(request.num_ranks):
        stages = range(rank, request.num_stages, request.num_ranks)
        order = [(F, s) for s in stages for _ in range(request.num_microbatches)]
        order += [(B, s) for s in reversed(stages) for _ in range(request.num_microbatches)]
        rows.append(order)
    placement = loop(request.num_ranks, request.stages_per_rank)
    return table_from_turns("looped-bfs", placement, request.num_microbatches, rows)


def _build_lagged(name: str, request: Request, split: bool) -> ActionTable:
    """Each rank takes p microbatches through a stage, then through its next one.

    With `split`, rank r runs its weight gradients r backwards late, as ZB-H1 does.
    """
    p, v = request.num_ranks, request.stages_per_rank
    # Patterns are made of whole groups of p microbatches.
    num_groups = -(-request.num_microbatches // p)
    check_size(request.num_stages, num_groups * p, f", whole groups of {p},")
    rows = []
    for rank in range(p):
        stages = range(rank, request.num_stages, p)
        up = [s for _ in range(num_groups) for s in stages for _ in range(p)]
        down = [s for _ in range(num_groups) for s in reversed(stages) for _ in range(p)]
        warmup = 2 * (p - 1 - rank) + (v - 1) * p
        forwards = [(F, s) for s in up]
        row: list[Turn] = [*forwards[:warmup]]
        backwards = [(I if split else B, s) for s in down]
        weights = [(W, s) for s in down] if split else []
        rows.append([*row, *_in_turn(forwards[warmup:], backwards, weights, rank)])
    return table_from_turns(name, loop(p, v), request.num_microbatches, rows)


def _in_turn(
    forwards: Sequence[Turn], backwards: Sequence[Turn], weights: Sequence[Turn], lag: int
) -> Iterator[Turn]:
    """A forward, a backward and, `lag` backwards later, its weight gradient."""
    late: list[Turn | None] = [None] * lag
    for turns in zip_longest(forwards, backwards, [*late, *weights]):
        yield from (turn for turn in turns if turn is not None)


_NEEDS = "stages = v * ranks (v is stages_per_rank, 2 unless given), any number of microbatches"

INTERLEAVED_1F1B = Recipe(
    name="interleaved-1f1b",
    summary="1f1b over v stages a rank: a v-th of its bubble for v times its messages",
    bubble="(p - 1) * (F + I + W)",
    memory="min(p * v + p - 1, m * v)",
    needs=_NEEDS,
    build=_build_1f1b,
    stages_per_rank=2,
    stages_are_free=True,
)

LOOPED_BFS = Recipe(
    name="looped-bfs",
    summary="gpipe over v stages a rank, one stage after the other: messages are easy to hide",
    bubble="(p - 1) * (F + I + W)",
    memory="m * v",
    needs=_NEEDS,
    build=_build_bfs,
    stages_per_rank=2,
    stages_are_free=True,
)

INTERLEAVED_ZB = Recipe(
    name="interleaved-zb",
    summary="interleaved-1f1b with weight gradients in its bubble",
    bubble="(p - 1) * (F + I - W)",
    memory="min(p * v + p - 1, m * v)",
    needs=_NEEDS,
    build=_build_zb,
    stages_per_rank=2,
    stages_are_free=True,
)
