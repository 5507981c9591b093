"""1F1B, or PipeDream-Flush (Narayanan et al., arXiv 2006.09503)."""

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.lag import build_lagged
from plait.core_ir.schedule.recipe import Recipe, Request


def _build(request: Request) -> ActionTable:
    return build_lagged("1f1b", request, warmup=lambda rank: request.num_ranks - rank)


ONE_F_ONE_B = Recipe(
    name="1f1b",
    summary="a forward and a backward in turn: the bubble of gpipe, at most p activations a rank",
    bubble="(p - 1) * (F + I + W)",
    memory="min(p, m)",
    needs="stages = ranks, any number of microbatches",
    build=_build,
)
