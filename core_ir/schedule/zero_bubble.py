"""The handcrafted zero-bubble schedules ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241, section 2).

What the paper calls B is I here. Weight gradients wait for nobody, so they are put where 1F1B
idles.
"""

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.lag import build_lagged
from plait.core_ir.schedule.recipe import Recipe, Request


def _build_h1(request: Request) -> ActionTable:
    return build_lagged(
        "zb-h1",
        request,
        warmup=lambda rank: request.num_ranks - rank,
        weight_lag=lambda rank: rank,
    )


def _build_h2(request: Request) -> ActionTable:
    return build_lagged(
        "zb-h2",
        request,
        warmup=lambda rank: 2 * (request.num_ranks - rank) - 1,
        weight_lag=lambda rank: 2 * rank,
    )


ZB_H1 = Recipe(
    name="zb-h1",
    summary="1f1b with weight gradients in its bubble: a third of the bubble, memory of 1f1b",
    bubble="(p - 1) * (F + I - W)",
    memory="min(p, m)",
    needs="stages = ranks, any number of microbatches",
    build=_build_h1,
)

ZB_H2 = Recipe(
    name="zb-h2",
    summary="zb-h1 with more forwards ahead: next to no bubble, twice the memory of 1f1b",
    bubble="(p - 1) * (F + I - 2 * W)",
    memory="min(2 * p - 1, m)",
    needs="stages = ranks, any number of microbatches",
    build=_build_h2,
)
