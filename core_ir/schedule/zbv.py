"""ZB-V: zero bubble with the memory of 1F1B, on a V of stages (Qi et al., arXiv 2401.10241, section 6)."""

from plait.core_ir.schedule.checks import check_size
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import F, I, W
from plait.core_ir.schedule.placement import vee
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.turns import Turn, table_from_turns


def _build(request: Request) -> ActionTable:
    p = request.num_ranks
    # The pattern needs 2 p - 1 microbatches to unfold.
    m = max(request.num_microbatches, 2 * p - 1)
    check_size(2 * p, m, ", which the pattern of 'zbv' takes to unfold,")
    rows = [_order(rank, p, m) for rank in range(p)]
    return table_from_turns("zbv", vee(p), request.num_microbatches, rows)


def _order(rank: int, p: int, m: int) -> list[Turn]:
    f0, i0, w0 = ((kind, rank) for kind in (F, I, W))
    f1, i1, w1 = ((kind, 2 * p - 1 - rank) for kind in (F, I, W))
    return [
        # Until the first gradient is there.
        *[f0] * (2 * (p - rank) - 1),
        *[f1, f0] * rank,
        *[f1, i1, w1] * (p - rank),
        # As long as there are microbatches to start, then to bring back.
        *[f0, i0, w0, f1, i1, w1] * (m - 2 * p + rank + 1),
        *[i0, w0, f1, i1, w1] * (p - rank - 1),
        # Input gradients first: other ranks wait for them.
        *[i0, i1] * rank,
        *[i0, w0] * (p - rank),
        *[w1] * rank,
        *[w0] * rank,
    ]


ZBV = Recipe(
    name="zbv",
    summary="zero bubble at the memory of 1f1b where F, I and W take equally long",
    bubble="0",
    memory="min(2 * p, 2 * m)",
    needs="stages = 2 * ranks, any number of microbatches",
    build=_build,
    stages_per_rank=2,
)
