"""A schedule in time: when every action starts and ends, and what follows from that."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core_ir.schedule.edges import Edge
from plait.core_ir.schedule.ir import Action, ActionTable, IntArray
from plait.core_ir.schedule.kinds import (
    IS_COMPUTE,
    KINDS,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
)
from plait.core_ir.schedule.times import FloatArray, Memory, Times
from plait.core_ir.schedule.transfers import Transfers, trace_transfers

# What a rank's optimizer step waits for: see `simulate.simulate`.
Sync = Literal["none", "barrier", "post_validate"]

_FORWARD = np.array([kind.forward for kind in KINDS])
_INPUT_GRADIENT = np.array([kind.input_gradient for kind in KINDS])
_WEIGHT_GRADIENT = np.array([kind.weight_gradient for kind in KINDS])


class TimedAction(NamedTuple):
    """One action of a timeline."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """The actions of `schedule` with their `start` and `end`, arrays in its order: by rank, then
    in time.

    Rates compare the work of a rank, the time its actions take (the mean where ranks differ), with
    a cost: (cost - work) / cost. `times` and `edges` are what was simulated; a measured timeline has
    none.
    """

    schedule: ActionTable
    start: FloatArray = field(repr=False)
    end: FloatArray = field(repr=False)
    memory: Memory = field(default_factory=Memory)
    times: Times | None = None
    edges: tuple[Edge, ...] = field(default=(), repr=False)
    sync: Sync = "none"

    @cached_property
    def rank(self) -> IntArray:
        """The rank of every action."""
        return self.schedule.rank_of_action

    @cached_property
    def tasks(self) -> tuple[TimedAction, ...]:
        """Every action with its rank, start and end."""
        times = zip(self.rank.tolist(), self.start.tolist(), self.end.tolist(), strict=True)
        return tuple(
            TimedAction(rank, self.schedule.action(index), start, end)
            for index, (rank, start, end) in enumerate(times)
        )

    @cached_property
    def transfers(self) -> Transfers | None:
        """The messages between ranks, None in a measured timeline."""
        if self.times is None:
            return None
        return trace_transfers(self.schedule, self.edges, self.times, self.end)

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks."""
        return float(self.end.max() - self.start.min()) if self.end.size else 0.0

    @property
    def longest_span(self) -> float:
        """First start to last end of the tasks of one rank, the largest over ranks.

        The optimizer step, which is no task of a microbatch, does not count.
        """
        return self._longest(self._computes)

    @property
    def step_time(self) -> float:
        """The time from one step to the next when steps follow each other without a pause, or more.

        A rank goes on as soon as its own step is done, so ranks that start late may end late: the
        longest time of a rank from its first action to its last. Exact where that rank works or waits
        for what its own first action led to, as where stages are alike; else an upper bound, as its
        waits at the begin of this step may be shorter in the next. Messages count as far as they hold
        up this step; those still on the lane when a rank is done do not. A barrier holds all ranks
        until the last one is done, which is what it costs.
        """
        if self.sync == "barrier":
            return self.makespan
        return self._longest(np.ones(self.start.shape, dtype=bool))

    @property
    def bubble_rate(self) -> float:
        """The idle share of a rank when the cost is the makespan."""
        return _idle_share(self.makespan, float(self._work.sum()) / self.schedule.num_ranks)

    @property
    def span_bubble_rate(self) -> float:
        """The idle share of a rank when the cost is the longest stage span."""
        work = float(self._work[self._computes].sum()) / self.schedule.num_ranks
        return _idle_share(self.longest_span, work)

    @property
    def peak_activations(self) -> IntArray:
        """The most stage activations each rank holds: from the start of F to the end of W or B."""
        whole = peak_memory(self.schedule, Memory())
        return np.rint(whole).astype(np.int64)

    @property
    def peak_memory(self) -> FloatArray:
        """The most memory each rank holds, in the unit of `memory`."""
        return peak_memory(self.schedule, self.memory)

    def held(self, rank: int) -> tuple[FloatArray, FloatArray]:
        """The memory that `rank` holds over time: `amount[k]` from `time[k]` on; starts at 0."""
        own = self.schedule.rows_of(rank)
        taken, freed = memory_changes(self.schedule, self.memory)
        # Its actions run one by one, so their starts and ends take turns.
        time = np.column_stack([self.start[own], self.end[own]]).ravel()
        change = np.column_stack([taken[own], -freed[own]]).ravel()
        resident = _resident(self.schedule, self.memory)[rank]
        amount = resident + np.concatenate([[0.0], np.cumsum(change)])
        return np.concatenate([[0.0], time]), amount

    def _longest(self, counted: NDArray[np.bool_]) -> float:
        first = np.full(self.schedule.num_ranks, np.inf)
        last = np.full(self.schedule.num_ranks, -np.inf)
        np.minimum.at(first, self.rank[counted], self.start[counted])
        np.maximum.at(last, self.rank[counted], self.end[counted])
        return float(max(0.0, (last - first).max()))

    @property
    def _work(self) -> FloatArray:
        return self.end - self.start

    @property
    def _computes(self) -> NDArray[np.bool_]:
        return IS_COMPUTE[self.schedule.kind]


def memory_changes(table: ActionTable, memory: Memory) -> tuple[FloatArray, FloatArray]:
    """What each action takes at its start and frees at its end."""
    activation, handover = memory.per_microbatch(table.num_stages)
    kind = table.kind
    backward = np.where(kind == OVERLAP_F_B.code, table.other_stage, table.stage)
    taken = np.where(_FORWARD[kind], activation[table.stage], 0.0)
    freed = np.where(_INPUT_GRADIENT[kind], (activation - handover)[backward], 0.0)
    freed += np.where(_WEIGHT_GRADIENT[kind], handover[backward], 0.0)
    unsharded, gradients = memory.while_sharded(table.num_stages)
    gathers, frees, reduces = (
        np.flatnonzero(kind == each.code) for each in (UNSHARD, RESHARD, REDUCE_GRAD)
    )
    taken[gathers] += unsharded[table.stage[gathers]]
    freed[frees] += unsharded[table.stage[frees]]
    weight = np.flatnonzero(_WEIGHT_GRADIENT[kind])[::-1]
    first = np.full(table.num_stages, -1)
    first[backward[weight]] = weight
    reduced = table.stage[reduces]
    np.add.at(taken, first[reduced], gradients[reduced])
    freed[reduces] += gradients[reduced]
    return taken, freed


def _resident(table: ActionTable, memory: Memory) -> FloatArray:
    """What each rank holds all the time; parameters and gradients that the schedule gathers and reduces come and go."""
    apart = (table.stage[table.kind == each.code].tolist() for each in (UNSHARD, REDUCE_GRAD))
    return memory.resident(table.placement, table.num_ranks, *apart)


def held_during(table: ActionTable, memory: Memory) -> FloatArray:
    """What its rank holds while each action runs: what it takes, and what it frees at its end, too."""
    taken, freed = memory_changes(table, memory)
    held = np.cumsum(taken) - (np.cumsum(freed) - freed)
    # The sums run on from rank to rank; each starts with what it holds all the time.
    begin = table.offsets[:-1]
    begun = np.diff(table.offsets) > 0
    resident = _resident(table, memory)
    resident[begun] -= held[begin[begun]] - taken[begin[begun]]
    return held + resident[table.rank_of_action]


def peak_memory(table: ActionTable, memory: Memory) -> FloatArray:
    """The most memory each rank holds. Its actions run one by one, so their order alone decides."""
    peaks = _resident(table, memory)
    np.maximum.at(peaks, table.rank_of_action, held_during(table, memory))
    return peaks


def _idle_share(cost: float, work: float) -> float:
    return (cost - work) / cost if cost > 0 else 0.0
