"""An order grown in time: whenever a rank is free, a policy chooses its next task.

Input gradients come first, since other ranks wait for them, then forwards; weight gradients fill
the time in which nothing else can run, and make room where memory is full. Policies differ in how
far forwards may run ahead and in whether a rank rather waits for what is about to come.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from plait.core_ir.schedule.order import Rows
from plait.core_ir.schedule.problem import Problem

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Policy:
    """How a rank chooses.

    `depth` is how many forwards of a stage may run ahead of its input gradients for each rank from
    there to the last one, `extra` how many more; depth 0 sets no bound but memory. The patiences
    are the share of a W, or of an F, by which one may delay what is known to come.
    """

    depth: int
    extra: int
    weight_patience: float
    forward_patience: float

    def ahead(self, rank: int, num_ranks: int) -> float:
        """The most forwards of a stage without their input gradients on `rank`."""
        if self.depth == 0:
            return math.inf
        return self.depth * (num_ranks - rank - 1) + 1 + self.extra


def policies() -> Iterator[Policy]:
    """The policies that a search tries."""
    patiences = (0.0, 0.1, 0.4, 1.0)
    depths = ((0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0))
    for (depth, extra), weight, forward in product(depths, patiences, patiences):
        yield Policy(depth, extra, weight, forward)


def grow(problem: Problem, policy: Policy) -> Rows:
    """Each rank's order, as numbers of `order`.

    Memory limits are kept: an F starts only while room is left for the same microbatch in the later
    stages of its rank, so that the oldest microbatch can always go on.
    """
    return _Growth(problem, policy).run()


class _Growth:
    """The state of all ranks while an order grows."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem = problem
        self.policy = policy
        num_stages, m = problem.num_stages, problem.num_microbatches
        ranks = range(problem.num_ranks)
        self.stages = [problem.stages_of(rank) for rank in ranks]
        self.ahead = [policy.ahead(rank, problem.num_ranks) for rank in ranks]
        self.limit = [limit * (1 + 1e-12) + _ROUNDING for limit in problem.limit]
        # What must stay free when F of a stage starts: the later stages of its rank.
        self.reserve = [
            sum(problem.activation[t] for t in self.stages[rank] if t > stage)
            for stage, rank in enumerate(problem.placement)
        ]
        self.held = [0.0] * problem.num_ranks
        self.busy_until = [0.0] * problem.num_ranks
        # How many F, I and W each stage has done, and when the inputs of F and I arrive.
        self.forwards = [0] * num_stages
        self.gradients = [0] * num_stages
        self.weights = [0] * num_stages
        self.activation_at = [[math.inf] * m for _ in range(num_stages)]
        self.activation_at[0] = [0.0] * m
        self.gradient_at = [[math.inf] * m for _ in range(num_stages)]
        self.rows: Rows = [[] for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]

    def run(self) -> Rows:
        total = [3 * self.problem.num_microbatches * len(stages) for stages in self.stages]
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.busy_until[rank] and len(self.rows[rank]) < total[rank]:
                self.step(now, rank)
        return self.rows

    def step(self, now: float, rank: int) -> None:
        """Start the next task of a rank that is free, or wait for what comes next."""
        problem, policy = self.problem, self.policy
        soon = now + _ROUNDING
        gradient = forward = weight = -1
        next_gradient = next_input = math.inf
        is_full = False
        # Of several stages the latest goes first: it is the closest to freeing memory.
        for stage in self.stages[rank]:
            started, done = self.forwards[stage], self.gradients[stage]
            if self.weights[stage] < done and weight < 0:
                weight = stage
            if done < started:
                arrival = self.gradient_at[stage][done]
                gradient = stage if arrival <= soon else gradient
                next_gradient = min(next_gradient, arrival)
            if started < problem.num_microbatches and started - done < self.ahead[rank]:
                arrival = self.activation_at[stage][started]
                room = self.limit[rank] - self.held[rank] - self.reserve[stage]
                if problem.activation[stage] > room:
                    is_full |= arrival <= soon
                else:
                    forward = stage if arrival <= soon else forward
                    next_input = min(next_input, arrival)
        if gradient >= 0:
            self.start(now, rank, 1, gradient)
            return
        if forward >= 0:
            delayed = now + problem.f[forward] * (1 - policy.forward_patience)
            if next_gradient >= delayed - _ROUNDING:
                self.start(now, rank, 0, forward)
                return
        awaited = next_gradient if forward >= 0 else min(next_gradient, next_input)
        if weight >= 0:
            delayed = now + problem.w[weight] * (1 - policy.weight_patience)
            if awaited >= delayed - _ROUNDING or (is_full and forward < 0):
                self.start(now, rank, 2, weight)
                return
        if awaited < math.inf:
            heapq.heappush(self.events, (awaited, rank))

    def start(self, now: float, rank: int, kind: int, stage: int) -> None:
        problem = self.problem
        counts = (self.forwards, self.gradients, self.weights)[kind]
        microbatch = counts[stage]
        counts[stage] += 1
        end = now + (problem.f, problem.i, problem.w)[kind][stage]
        if kind == 0:
            self.held[rank] += problem.activation[stage]
            if stage + 1 < problem.num_stages:
                delay = problem.forward_delay[stage + 1]
                self.send(now, self.activation_at, stage + 1, microbatch, end + delay)
            else:
                self.gradient_at[stage][microbatch] = end
        elif kind == 1:
            self.held[rank] += problem.handover[stage] - problem.activation[stage]
            if stage > 0:
                delay = problem.backward_delay[stage - 1]
                self.send(now, self.gradient_at, stage - 1, microbatch, end + delay)
        else:
            self.held[rank] -= problem.handover[stage]
        task = (kind * problem.num_stages + stage) * problem.num_microbatches + microbatch
        self.rows[rank].append(task)
        self.busy_until[rank] = end
        heapq.heappush(self.events, (end, rank))

    def send(
        self, now: float, arrivals: list[list[float]], stage: int, microbatch: int, arrival: float
    ) -> None:
        """Let the rank of `stage`, which may be idle, know what will come."""
        arrivals[stage][microbatch] = arrival
        rank = self.problem.placement[stage]
        heapq.heappush(self.events, (max(now, self.busy_until[rank]), rank))
