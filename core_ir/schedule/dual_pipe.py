"""DualPipeV: the forward of one microbatch overlapped with the backward of another, on a V of stages.

DeepSeek-AI, github.com/deepseek-ai/DualPipe (DualPipeV), after DualPipe of arXiv 2412.19437, section
3.2.1, cut in half as Qi et al. propose.
"""

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import counted
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import OVERLAP_F_B, B, F, I, W
from plait.core_ir.schedule.placement import vee
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.turns import Turn, table_from_turns


def _build(request: Request) -> ActionTable:
    p, m = request.num_ranks, request.num_microbatches
    if m < 2 * p:
        raise ScheduleError(
            f"schedule 'dualpipev' on {counted(p, 'rank')} needs at least {2 * p} microbatches, got {m}"
        )
    rows = [_order(rank, p, m) for rank in range(p)]
    return table_from_turns("dualpipev", vee(p), m, rows)


def _order(rank: int, p: int, m: int) -> list[Turn]:
    down, up = rank, 2 * p - 1 - rank
    f0, b0, i0 = ((kind, down) for kind in (F, B, I))
    f1, b1, i1, w1 = ((kind, up) for kind in (F, B, I, W))
    pair_01: Turn = (OVERLAP_F_B, down, up)
    pair_10: Turn = (OVERLAP_F_B, up, down)

    last = rank == p - 1
    # The last rank has both ends of its first pair at hand only one after the other.
    first: list[Turn] = [f0, b1] if last else [pair_01]
    # Of the last rank + 1 backwards of each stage, the later half leaves its W for later.
    fused_1, fused_0 = (rank + 2) // 2, (rank + 1) // 2
    closing: list[Turn] = []
    for k in range(rank + 1):
        closing += [b1 if k < fused_1 else i1, b0 if k < fused_0 else i0]
    late = [(W, stage) for kind, stage, *_ in closing if kind is I]
    late += [(W, down)] * (p - rank - 1)
    waiting = p - rank - 1
    return [
        *[f0] * (2 * waiting),
        *[f0, f1] * (rank + 1),
        *[i1, w1, f1] * waiting,
        *first,
        pair_10,
        *[pair_01, pair_10] * (m - 2 * p + rank),
        *[b1, pair_10] * waiting,
        *closing,
        *(turn for w in late[:waiting] for turn in (w, i0)),
        *late[waiting:],
    ]


DUALPIPEV = Recipe(
    name="dualpipev",
    summary="forwards overlapped with backwards, each hiding the other's messages",
    bubble="(p - 1) * (FB + I - 2 * W)",
    memory="2 * p + 1",
    needs="stages = 2 * ranks, microbatches >= 2 * ranks",
    build=_build,
    stages_per_rank=2,
)
