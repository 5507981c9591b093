"""What a search is asked to order: tasks with their times, delays between them, and memory limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait.core_ir.errors import ScheduleError
from plait.core_ir.schedule.checks import counted
from plait.core_ir.schedule.edges import chain_edges
from plait.core_ir.schedule.recipe import Request
from plait.core_ir.schedule.times import Memory, PerEdge, Times, per_edge, per_stage

# What is made small first; the other one decides between equals.
Objective = Literal["makespan", "span"]
Cost = tuple[float, float]

_UNIT_TIMES = Times(f=1, i=1, w=1)


@dataclass(frozen=True)
class Problem:
    """A chain of stages, each with F, I and W of every microbatch, on ranks with a memory limit.

    All tuples but `limit` have an entry a stage. `forward_delay[s]` is how long activations are on
    their way to stage s, `backward_delay[s]` the same for gradients. `limit[r]` is what rank r may
    hold beside its parameters.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    forward_delay: tuple[float, ...]
    backward_delay: tuple[float, ...]
    activation: tuple[float, ...]
    handover: tuple[float, ...]
    limit: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        return len(self.limit)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in order."""
        return tuple(s for s, placed in enumerate(self.placement) if placed == rank)


def pose(request: Request, placement: Sequence[int], limit: float | None) -> Problem:
    """The problem of a request with its stages placed so, and at most `limit` held on a rank."""
    num_stages = len(placement)
    times, memory = request.times or _UNIT_TIMES, request.memory or Memory()
    f, i, w = (
        tuple(per_stage(value, num_stages, f"Times.{name}").tolist())
        for value, name in ((times.f, "f"), (times.i, "i"), (times.w, "w"))
    )
    latency = _hops(placement, times.comm, "Times.comm")
    transfer = _hops(placement, times.transfer, "Times.transfer")
    delay = {hop: latency[hop] + transfer[hop] for hop in latency}
    activation, handover = memory.per_microbatch(num_stages)
    # A hand-over larger than what I frees must have its room from the start.
    activation = np.maximum(activation, handover)
    resident = memory.resident(placement, request.num_ranks)
    bound = math.inf if limit is None else limit
    return Problem(
        tuple(placement),
        request.num_microbatches,
        f,
        i,
        w,
        tuple(delay.get((s - 1, s), 0.0) for s in range(num_stages)),
        tuple(delay.get((s + 1, s), 0.0) for s in range(num_stages)),
        tuple(activation.tolist()),
        tuple(handover.tolist()),
        tuple(bound - held for held in resident.tolist()),
    )


def least_limit(request: Request, placement: Sequence[int]) -> float:
    """The least limit that any schedule can keep: every rank with one microbatch in all its stages."""
    memory = request.memory or Memory()
    activation, _ = memory.per_microbatch(len(placement))
    held = memory.resident(placement, request.num_ranks)
    for stage, rank in enumerate(placement):
        held[rank] += activation[stage]
    return float(held.max())


def check_limit(request: Request, placements: Sequence[Sequence[int]], limit: float | None) -> None:
    """Raise `ScheduleError`, with the least limit possible, if no placement can keep `limit`."""
    least = min(least_limit(request, placement) for placement in placements)
    if limit is not None and limit < least:
        raise ScheduleError(
            f"no schedule of {counted(request.num_stages, 'stage')} on {counted(request.num_ranks, 'rank')} keeps a"
            f" memory limit of {limit:g}; the least limit possible is {least:g}, that of one"
            " microbatch at a time"
        )


def lower_bound(problem: Problem, objective: Objective) -> float:
    """What no schedule can beat: the work of a rank, after its first input has come for makespan."""
    bounds = []
    m = problem.num_microbatches
    for rank in range(problem.num_ranks):
        stages = problem.stages_of(rank)
        work = m * sum(problem.f[s] + problem.i[s] + problem.w[s] for s in stages)
        first = min(stages, default=0)
        head = sum(problem.f[:first]) + sum(problem.forward_delay[: first + 1])
        bounds.append(work + (head if objective == "makespan" else 0.0))
    through = sum(problem.f) + sum(problem.i) + problem.w[0]
    through += sum(problem.forward_delay) + sum(problem.backward_delay)
    # One microbatch starts and ends on the rank of stage 0.
    return max(*bounds, through)


def _hops(placement: Sequence[int], value: PerEdge, what: str) -> dict[tuple[int, int], float]:
    """The cost of each hop between stages on different ranks."""
    edges = [(e.source, e.target) for e in chain_edges(len(placement))]
    hops = [(s, t) for s, t in edges if placement[s] != placement[t]]
    return dict(zip(hops, per_edge(value, hops, what).tolist(), strict=True))
