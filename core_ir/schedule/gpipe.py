"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965, section 2.3)."""

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.lag import build_lagged
from plait.core_ir.schedule.recipe import Recipe, Request


def _build(request: Request) -> ActionTable:
    return build_lagged("gpipe", request, warmup=lambda rank: request.num_microbatches)


GPIPE = Recipe(
    name="gpipe",
    summary="all forwards, then all backwards; every activation is held until then",
    bubble="(p - 1) * (F + I + W)",
    memory="m",
    needs="stages = ranks, any number of microbatches",
    build=_build,
)
