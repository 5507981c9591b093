"""V-Half and V-Min: a V of stages that holds half or a third of 1F1B's activations.

Qi et al., arXiv 2405.15362, sections 3 and 4: a building block says when a microbatch runs its
tasks on each rank; repeated every six units of time, one for each task of a rank, its lifespans
bound the memory. Here the block gives the order of F and I; W, which nobody waits for, fills the
idle time.
"""

from collections import deque
from collections.abc import Callable, Sequence

from plait.core_ir.schedule.checks import check_size
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import ActionKind, F, I, W
from plait.core_ir.schedule.placement import vee
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.turns import Turn, table_from_turns

# F, I and W of a rank's two stages, a unit each.
_PERIOD = 6

# When a rank runs F down the V, F up, I down, I up.
Block = tuple[int, int, int, int]


def _half_block(rank: int, p: int) -> Block:
    # Two units a hop down, one up; a block of even p needs another turn to avoid collisions.
    turn = 1 if p % 2 else 4
    down = 2 * rank
    up = 3 * p - 2 - rank
    return (down, up, 3 * p - 1 + down, 6 * p - 3 + turn - rank)


def _min_block(rank: int, p: int) -> Block:
    # A unit a hop; a block of p divisible by 3 waits at the end of the V to avoid collisions.
    turn = 0 if p % 3 else 2
    return (rank, 2 * p - 1 - rank, 2 * p + turn + rank, 4 * p - 1 + turn - rank)


def _build_half(request: Request) -> ActionTable:
    limit = 2 * ((request.num_ranks + 2) // 2)
    return _build("v-half", request, _half_block, limit)


def _build_min(request: Request) -> ActionTable:
    limit = 2 * ((request.num_ranks + 4) // 3)
    return _build("v-min", request, _min_block, limit)


def _build(
    name: str, request: Request, block: Callable[[int, int], Block], limit: int
) -> ActionTable:
    p, m = request.num_ranks, request.num_microbatches
    # Filling looks at every rank in every unit of time: those of the tasks, and of the way down and up.
    check_size(2 * p, m + p, f", {p} of them for the way through the ranks,")
    orders = [_repeat(block(rank, p), rank, p, m) for rank in range(p)]
    return table_from_turns(name, vee(p), m, _fill(orders, limit))


def _repeat(block: Block, rank: int, p: int, m: int) -> list[Turn]:
    """The F and I of one rank in the order of the block repeated `m` times."""
    down, up = rank, 2 * p - 1 - rank
    turns: tuple[Turn, ...] = ((F, down), (F, up), (I, up), (I, down))
    timed = [
        (start + _PERIOD * microbatch, turn)
        for start, turn in zip(block, turns, strict=True)
        for microbatch in range(m)
    ]
    # No two tasks of a rank share a time.
    return [turn for _, turn in sorted(timed, key=lambda entry: entry[0])]


def _fill(orders: Sequence[Sequence[Turn]], limit: int) -> list[list[Turn]]:
    """Run the orders in unit times, at most `limit` activations a rank, with W where a rank idles."""
    last = 2 * len(orders) - 1
    todo = [deque(order) for order in orders]
    waiting: list[deque[Turn]] = [deque() for _ in orders]
    rows: list[list[Turn]] = [[] for _ in orders]
    held = [0] * len(orders)
    # How many F and I each stage has done.
    done_f, done_i = [0] * (last + 1), [0] * (last + 1)

    def can_run(rank: int, kind: ActionKind, stage: int) -> bool:
        if kind is F:
            return (stage == 0 or had_f[stage - 1] > had_f[stage]) and held[rank] < limit
        return (had_f[stage] if stage == last else had_i[stage + 1]) > had_i[stage]

    while any(todo) or any(waiting):
        had_f, had_i = list(done_f), list(done_i)
        for rank, row in enumerate(rows):
            if todo[rank] and can_run(rank, *todo[rank][0][:2]):
                turn = todo[rank].popleft()
            elif waiting[rank]:
                turn = waiting[rank].popleft()
            else:
                continue
            row.append(turn)
            kind, stage = turn[:2]
            if kind is F:
                done_f[stage] += 1
            if kind is I:
                done_i[stage] += 1
                waiting[rank].append((W, stage))
            held[rank] += (kind is F) - (kind is W)
    return rows


_NEEDS = "stages = 2 * ranks, any number of microbatches"

V_HALF = Recipe(
    name="v-half",
    summary="half the memory of 1f1b and half its bubble, where F, I and W take equally long",
    bubble="(3 * p - 4 + (p < 3)) * F",
    memory="min(2 * ((p + 2) // 2), 2 * m)",
    needs=_NEEDS,
    build=_build_half,
    stages_per_rank=2,
)

V_MIN = Recipe(
    name="v-min",
    summary="a third of the memory of 1f1b, two thirds of its bubble",
    bubble="max(4 * p - 5 + 2 * (p % 3 == 0), 0) * F",
    memory="min(2 * ((p + 4) // 3), 2 * m)",
    needs=_NEEDS,
    build=_build_min,
    stages_per_rank=2,
)
