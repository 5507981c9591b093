"""A local search over orders: move a task along the critical path, keep what is not much worse.

Late acceptance (Burke and Bykov, 2017): a move is taken if it is no worse than the present order or
than the one some steps ago. Everything is drawn from one seed, so a search gives the same schedule
on every machine and every rank.
"""

import random
from dataclasses import dataclass

from plait.core_ir.schedule.order import Clock, Rows, cost_of
from plait.core_ir.schedule.problem import Cost, Objective

_MEMORY_OF_COSTS = 100
_TRIES = 40
_ROUNDING = 1e-9


def improve(
    clock: Clock, rows: Rows, objective: Objective, num_steps: int, enough: float, seed: int = 0
) -> tuple[Cost, Rows]:
    """The best order found from `rows` in `num_steps` moves, or earlier when its cost is `enough`.

    Memory limits and the order of the microbatches of each stage are kept.
    """
    state = _State(clock, [list(row) for row in rows], random.Random(seed))
    times = clock.run(state.rows)
    if times is None:
        raise AssertionError("a local search must start from an order that can run")
    cost = cost_of(state.rows, times, objective)
    best, best_rows = cost, [list(row) for row in state.rows]
    past = [cost] * _MEMORY_OF_COSTS
    for step in range(num_steps):
        if best[0] <= enough + _ROUNDING:
            break
        move = state.propose(times, objective)
        if move is None:
            continue
        before = state.rows[move.rank]
        state.rows[move.rank] = move.row
        moved = clock.run(state.rows)
        slot = step % _MEMORY_OF_COSTS
        accepted = False
        if moved is not None:
            new = cost_of(state.rows, moved, objective)
            accepted = new <= cost or new <= past[slot]
        if moved is None or not accepted:
            state.rows[move.rank] = before
        else:
            cost, times = new, moved
            if cost < best:
                best, best_rows = cost, [list(row) for row in state.rows]
        past[slot] = cost
    return best, best_rows


@dataclass(frozen=True)
class _Move:
    """`row` as the new order of `rank`."""

    rank: int
    row: list[int]


class _State:
    """An order under change, with the drawing of its moves."""

    def __init__(self, clock: Clock, rows: Rows, draw: random.Random) -> None:
        self.clock = clock
        self.rows = rows
        self.draw = draw

    def propose(self, times: tuple[list[float], list[float]], objective: Objective) -> _Move | None:
        """A legal move, most often of a task on the critical path; None if none was found."""
        blocks = self.critical_blocks(times, objective)
        for _ in range(_TRIES):
            rank, origin, goal = self.draw_move(blocks)
            row = self.rows[rank]
            goal = self.reach(row, origin, goal)
            if origin == goal:
                continue
            changed = list(row)
            changed.insert(goal, changed.pop(origin))
            if self.clock.fits(rank, changed):
                return _Move(rank, changed)
        return None

    def draw_move(self, blocks: list[tuple[int, int, int]]) -> tuple[int, int, int]:
        """A rank, a position and where its task is to go."""
        draw = self.draw
        if not blocks or draw.random() < 0.2:
            rank = draw.randrange(len(self.rows))
            last = len(self.rows[rank]) - 1
            origin = draw.randint(0, last)
            return rank, origin, min(max(origin + draw.randint(-8, 8), 0), last)
        # Only what changes the ends of a critical block can make its path shorter.
        rank, first, last = draw.choice(blocks)
        if draw.random() < 0.5:
            origin = draw.randint(first + 1, last)
            return rank, origin, first if draw.random() < 0.5 else draw.randint(first, origin - 1)
        origin = draw.randint(first, last - 1)
        goal = last if draw.random() < 0.5 else draw.randint(origin + 1, last)
        if self.clock.kind(self.rows[rank][origin]) == 2 and draw.random() < 0.5:
            goal = min(goal + draw.randint(0, 5), len(self.rows[rank]) - 1)
        return rank, origin, goal

    def reach(self, row: list[int], origin: int, goal: int) -> int:
        """How far towards `goal` the task at `origin` can go: the order within a stage stays."""
        clock = self.clock
        m = clock.problem.num_microbatches
        task = row[origin]
        kind, stage, microbatch = clock.kind(task), clock.stage(task), task % m
        step = 1 if goal > origin else -1
        at = origin
        while at != goal:
            other = row[at + step]
            if clock.stage(other) == stage and (
                clock.kind(other) == kind or other % m == microbatch
            ):
                break
            at += step
        return at

    def critical_blocks(
        self, times: tuple[list[float], list[float]], objective: Objective
    ) -> list[tuple[int, int, int]]:
        """The runs of tasks without a pause on the longest path: rank, first and last position.

        Runs of one task are left out: moving it within itself changes nothing.
        """
        start, end = times
        clock, rows = self.clock, self.rows
        place = {task: at for row in rows for at, task in enumerate(row)}
        home = clock.problem.placement

        def length(rank: int) -> float:
            row = rows[rank]
            return end[row[-1]] - (start[row[0]] if objective == "span" else 0.0) if row else 0.0

        rank = max(range(len(rows)), key=length)
        at = last = len(rows[rank]) - 1
        blocks = []
        while True:
            task = rows[rank][at]
            if at > 0 and end[rows[rank][at - 1]] >= start[task] - _ROUNDING:
                at -= 1
                continue
            if at < last:
                blocks.append((rank, at, last))
            source = clock.source[task]
            if source < 0:
                return blocks
            rank = home[clock.stage(source)]
            at = last = place[source]
