"""The table that drives an spmd program: for each rank and tick, which task runs on which rows of which pools."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from plait.backends.jax.spmd.layout import Layout
from plait.backends.jax.spmd.pools import PHASES, Pools
from plait.backends.jax.spmd.slots import colour
from plait.backends.jax.spmd.wiring import Body, TaskKey, Wired
from plait.backends.order import TaskOf
from plait.core_ir.program import PAIR

BODIES: tuple[Body, ...] = (PAIR, *PHASES)
_TIMES_PER_TICK = len(BODIES) + 1
"""The phases of a tick, then the exchange of messages."""

Column: TypeAlias = tuple[str | int, ...]
"""("run", kind) 0 or 1, ("branch", kind), ("read", kind, pool, n) a row, ("write", kind, pool) a row, ("arrive", pool)
the row a message goes to."""


@dataclass(frozen=True)
class Plan:
    """What the traced program needs to know. `table` is i32[ranks, ticks, columns].

    branches: for each kind, one task for each piece of program (tasks of equal signature share one).
    written: for each kind, the pools that some branch writes, in order.
    num_rows: for each pool. senders: for each pool of messages between ranks, the ranks that ever send.
    """

    num_ranks: int
    num_microbatches: int
    pools: Pools
    tasks: Mapping[TaskKey, Wired]
    table: NDArray[np.int32]
    columns: Mapping[Column, int]
    branches: Mapping[Body, tuple[Wired, ...]]
    written: Mapping[Body, tuple[str, ...]]
    num_rows: Mapping[str, int]
    senders: Mapping[str, tuple[int, ...]]

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The fields of each pool."""
        return self.pools.layouts

    def is_remote(self, pool: str) -> bool:
        """Whether the pool holds messages between different ranks."""
        return self.pools.offsets.get(pool, 0) != 0

    @cached_property
    def kinds(self) -> tuple[Body, ...]:
        """The kinds of task that run, in the order of phases."""
        return tuple(kind for kind in BODIES if kind in self.branches)

    def sent_by(self, kind: Body) -> Iterator[str]:
        """The pools of messages to other ranks that no later phase of a tick writes."""
        later = self.kinds[self.kinds.index(kind) + 1 :]
        for pool in self.written[kind]:
            if self.is_remote(pool) and not any(pool in self.written[other] for other in later):
                yield pool


def make_plan(
    pools: Pools,
    tasks: Mapping[TaskKey, Wired],
    ticks: Mapping[TaskOf, int],
    pairs: Iterable[tuple[TaskOf, TaskOf]],
    placement: Sequence[int],
    num_microbatches: int,
    num_ranks: int,
) -> Plan:
    """Rows for every value and the table that says so.

    `ticks` says when each task runs; `pairs`, (backward, forward), which run as one: those that are among `tasks`.
    """
    runs = _runs(tasks, ticks, pairs)
    return _Planner(pools, tasks, runs, tuple(placement), num_ranks, num_microbatches).plan()


class _Run(NamedTuple):
    """One task in one tick, with the microbatch of each of its parts."""

    key: TaskKey
    tick: int
    microbatches: tuple[int, ...]


def _runs(
    tasks: Mapping[TaskKey, Wired],
    ticks: Mapping[TaskOf, int],
    pairs: Iterable[tuple[TaskOf, TaskOf]],
) -> list[_Run]:
    runs, paired = [], set[TaskOf]()
    for (_, backward, mb), (_, forward, mf) in pairs:
        key = (PAIR, (backward, forward))
        if key in tasks:
            runs.append(_Run(key, ticks["F", forward, mf], (mb, mf)))
            paired |= {("F", forward, mf), ("I", backward, mb), ("W", backward, mb)}
    for (kind, stage, m), tick in ticks.items():
        if (kind, stage, m) not in paired:
            runs.append(_Run((kind, (stage,)), tick, (m,)))
    return runs


class _Planner:
    def __init__(
        self,
        pools: Pools,
        tasks: Mapping[TaskKey, Wired],
        runs: Sequence[_Run],
        placement: tuple[int, ...],
        num_ranks: int,
        num_microbatches: int,
    ) -> None:
        self.pools, self.tasks, self.runs = pools, tasks, runs
        self.placement, self.num_ranks = placement, num_ranks
        self.num_microbatches = num_microbatches
        self.kinds = tuple(k for k in BODIES if any(kind == k for kind, _ in tasks))
        self.times = dict(self._times())
        self.branch_of, self.branches = self._branches()
        self.written = {
            kind: tuple(sorted({p for task in self.branches[kind] for p in task.written}))
            for kind in self.kinds
        }
        self.rows: dict[str, dict[tuple[int, int], int]] = {}
        """Rows of what tasks hand each other, by (owner, microbatch)."""
        self.num_rows: dict[str, int] = {}
        for pool in pools.bundles:
            self._lay_out(pool)

    def _branches(
        self,
    ) -> tuple[dict[TaskKey, int], dict[Body, tuple[Wired, ...]]]:
        numbers: dict[TaskKey, int] = {}
        branches: dict[Body, tuple[Wired, ...]] = {}
        for kind in self.kinds:
            seen: dict[tuple[object, ...], int] = {}
            chosen: list[Wired] = []
            for key, task in self.tasks.items():
                if key[0] != kind:
                    continue
                if task.signature not in seen:
                    seen[task.signature] = len(chosen)
                    chosen.append(task)
                numbers[key] = seen[task.signature]
            branches[kind] = tuple(chosen)
        return numbers, branches

    # Rows.

    def _ordinal(self, pool: str, stage: int) -> int:
        """Which of the rank's stages that have rows in the pool this one is."""
        rank = self.placement[stage]
        owners = self.pools.bundles[pool]
        return sum(1 for s in owners if s < stage and self.placement[s] == rank)

    def _lay_out(self, pool: str) -> None:
        if pool == "microbatch":
            self.num_rows[pool] = self.num_microbatches
            return
        owners = self.pools.bundles[pool]
        if pool in ("params", "frozen", "buffers", "state", "grads.I", "grads.W", "loss", "aux"):
            held = 1 + max(self._ordinal(pool, stage) for stage in owners)
            self.num_rows[pool] = held * (self.num_microbatches if pool in ("loss", "aux") else 1)
        else:
            self._colour(pool)
        if self._needs_spare(pool):
            self.num_rows[pool] += 1

    def _needs_spare(self, pool: str) -> bool:
        """Whether some task, or some tick, writes the pool without having anything for it: into a last row."""
        if self.pools.offsets.get(pool, 0):
            return True
        if pool.startswith("grads"):  # such tasks add zeros instead, which changes no sum
            return False
        return any(
            pool in self.written[kind] and pool not in task.written
            for (kind, _), task in self.tasks.items()
        )

    def _colour(self, pool: str) -> None:
        offset = self.pools.offsets.get(pool, 0)
        born_by = "I" if pool == "handover" or pool.startswith("gradient") else "F"
        readers: dict[int, list[tuple[Body, int]]] = {}
        for (kind, stages), task in self.tasks.items():
            for (other, _), row in task.rows.items():
                if other == pool and kind != PAIR:  # its halves read what F, I and W read
                    readers.setdefault(row.owner, []).append((kind, stages[0]))
        rows: dict[tuple[int, int], int] = {}
        num_rows = 0
        for rank in range(self.num_ranks):
            intervals = {}
            for owner in self.pools.bundles[pool]:
                if (self.placement[owner] + offset) % self.num_ranks != rank:
                    continue
                for m in range(self.num_microbatches):
                    birth = self.times[born_by, owner, m]
                    if offset:  # it arrives at the end of the tick
                        birth += _TIMES_PER_TICK - 1 - birth % _TIMES_PER_TICK
                    deaths = [self.times[kind, stage, m] for kind, stage in readers.get(owner, ())]
                    intervals[owner, m] = (birth, max(deaths, default=birth))
            coloured, needed = colour(intervals)
            rows.update(coloured)
            num_rows = max(num_rows, needed)
        self.rows[pool], self.num_rows[pool] = rows, num_rows

    def _times(self) -> Iterator[tuple[tuple[Body, int, int], int]]:
        """When each F, I and W runs: those of a pair when the pair does."""
        for (kind, stages), tick, microbatches in self.runs:
            time = tick * _TIMES_PER_TICK + BODIES.index(kind)
            if kind == PAIR:
                (backward, forward), (mb, mf) = stages, microbatches
                yield from ((("F", forward, mf), time), (("I", backward, mb), time))
                yield ("W", backward, mb), time
            else:
                yield (kind, stages[0], microbatches[0]), time

    def _row(self, pool: str, owner: int, microbatch: int) -> int:
        if pool == "microbatch":
            return microbatch
        if pool in self.rows:
            return self.rows[pool][owner, microbatch]
        ordinal = self._ordinal(pool, owner)
        return ordinal * self.num_microbatches + microbatch if pool in ("loss", "aux") else ordinal

    def _spare(self, pool: str) -> int:
        return 0 if pool.startswith("grads") else self.num_rows[pool] - 1

    # The table.

    def plan(self) -> Plan:
        columns = {column: number for number, column in enumerate(self._columns())}
        num_ticks = 1 + max((run.tick for run in self.runs), default=-1)
        table = np.zeros((self.num_ranks, num_ticks, len(columns)), np.int32)
        for column, number in columns.items():
            if column[0] in ("write", "arrive"):
                table[:, :, number] = self._spare(str(column[-1]))
        senders: dict[str, set[int]] = {}
        for key, tick, microbatches in self.runs:
            kind, task = key[0], self.tasks[key]
            rank = self.placement[task.stages[0]]
            entry = table[rank, tick]
            entry[columns["run", kind]] = 1
            entry[columns["branch", kind]] = self.branch_of[key]
            for (pool, number), (owner, part) in task.rows.items():
                row = self._row(pool, owner, microbatches[part])
                entry[columns["read", kind, pool, number]] = row
            for pool, (stage, part) in task.written.items():
                m = microbatches[part]
                offset = self.pools.offsets.get(pool, 0)
                if offset:
                    senders.setdefault(pool, set()).add(rank)
                    there = table[(rank + offset) % self.num_ranks, tick]
                    there[columns["arrive", pool]] = self._row(pool, stage, m)
                else:
                    entry[columns["write", kind, pool]] = self._row(pool, stage, m)
        return Plan(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            pools=self.pools,
            tasks=self.tasks,
            table=table,
            columns=columns,
            branches=self.branches,
            written=self.written,
            num_rows=self.num_rows,
            senders={pool: tuple(sorted(ranks)) for pool, ranks in senders.items()},
        )

    def _columns(self) -> dict[Column, None]:
        columns: dict[Column, None] = {}
        for kind in self.kinds:
            columns["run", kind] = columns["branch", kind] = None
            for (other, _), task in self.tasks.items():
                if other == kind:
                    columns.update((("read", kind, *key), None) for key in task.rows)
            columns.update(
                (("write", kind, pool), None)
                for pool in self.written[kind]
                if not self.pools.offsets.get(pool, 0)
            )
        remote = [pool for pool, offset in self.pools.offsets.items() if offset]
        columns.update((("arrive", pool), None) for pool in remote)
        return columns
