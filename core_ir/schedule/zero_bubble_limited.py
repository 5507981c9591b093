"""ZB-1p and ZB-2p: the least bubble that a search finds under a memory limit.

Qi et al., arXiv 2401.10241, section 3: automatic scheduling for the times at hand, with the memory
of 1F1B (ZB-1p) or twice that (ZB-2p). The bubble is that of the longest stage span, since ranks
that start late may end late. The search is ours.
"""

from dataclasses import replace

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.problem import check_limit, pose
from plait.core_ir.schedule.recipe import Recipe, Request
from plait.core_ir.schedule.search import search
from plait.core_ir.schedule.zero_bubble import ZB_H1, ZB_H2


def _build_1p(request: Request) -> ActionTable:
    return _build("zb-1p", request, 1)


def _build_2p(request: Request) -> ActionTable:
    return _build("zb-2p", request, 2)


def _build(name: str, request: Request, times_p: int) -> ActionTable:
    placement = range(request.num_ranks)
    check_limit(request, [placement], request.memory_limit)
    problem = pose(request, placement, request.memory_limit)
    if request.memory_limit is None:
        bound = times_p * request.num_ranks * max(problem.activation)
        problem = replace(problem, limit=(bound,) * request.num_ranks)
    known = [ZB_H1.build(request), ZB_H2.build(request)]
    found = search(name, problem, "span", known)
    if found is None:
        raise ScheduleError(
            f"schedule {name!r} runs I and W apart, and what I hands over to W does not fit into a"
            f" memory limit of {request.memory_limit:g}; take 'auto', or a higher limit"
        )
    return found


ZB_1P = Recipe(
    name="zb-1p",
    summary="the least bubble found for these task times in p activations, the memory of 1f1b",
    bubble="(p - 1) * (F + I - W)",
    memory="min(p, m)",
    needs="stages = ranks, any number of microbatches; takes times, memory, memory_limit",
    build=_build_1p,
)

ZB_2P = Recipe(
    name="zb-2p",
    summary="the least bubble found for these task times in 2 p activations",
    bubble="(p - 1) * max(F + I - 2 * W, 0)",
    memory="min(2 * p, m)",
    needs="stages = ranks, any number of microbatches; takes times, memory, memory_limit",
    build=_build_2p,
)
