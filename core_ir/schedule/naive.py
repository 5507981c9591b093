"""No pipelining: a microbatch goes through all stages and back before the next one starts."""

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.lag import build_lagged
from plait.core_ir.schedule.recipe import Recipe, Request


def _build(request: Request) -> ActionTable:
    return build_lagged("naive", request, warmup=lambda rank: 1)


NAIVE = Recipe(
    name="naive",
    summary="one microbatch at a time: what pipelining is measured against",
    bubble="(p - 1) * m * (F + I + W)",
    memory="1",
    needs="stages = ranks, any number of microbatches",
    build=_build,
)
