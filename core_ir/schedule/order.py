"""Orders in a search: a rank's tasks as numbers, and when they run.

Task `(kind * num_stages + stage) * num_microbatches + microbatch`, with kinds 0 F, 1 I, 2 W. A
search looks at thousands of orders, so these are plain lists.
"""

from collections.abc import Sequence

import numpy as np

from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.kinds import KINDS, OVERLAP_F_B, F, I, W
from plait.core_ir.schedule.problem import Cost, Objective, Problem
from plait.core_ir.schedule.recipe import Row, table_from_rows

Rows = list[list[int]]

_KINDS = (F, I, W)


class Clock:
    """When the tasks of an order run; made once for a problem."""

    def __init__(self, problem: Problem) -> None:
        num_stages, m = problem.num_stages, problem.num_microbatches
        self.problem = problem
        self.per_kind = num_stages * m
        self.num_tasks = 3 * self.per_kind
        self.duration: list[float] = []
        # The task on another rank, if any, that feeds a task, and how long that is on its way.
        self.source: list[int] = []
        self.delay: list[float] = []
        for kind, times in enumerate((problem.f, problem.i, problem.w)):
            for stage, time in enumerate(times):
                feeding = (stage - 1, stage + 1, -1)[kind]
                fed = 0 <= feeding < num_stages
                delay = (problem.forward_delay, problem.backward_delay, times)[kind][stage]
                for microbatch in range(m):
                    task = (kind * num_stages + feeding) * m + microbatch
                    self.duration.append(time)
                    self.source.append(task if fed else -1)
                    self.delay.append(delay if fed else 0.0)

    def kind(self, task: int) -> int:
        return task // self.per_kind

    def stage(self, task: int) -> int:
        return task % self.per_kind // self.problem.num_microbatches

    def run(self, rows: Rows) -> tuple[list[float], list[float]] | None:
        """Start and end of every task; None if tasks wait for each other in a circle."""
        duration, source, delay = self.duration, self.source, self.delay
        start = [0.0] * self.num_tasks
        end = [-1.0] * self.num_tasks
        now_on = [0.0] * len(rows)
        cursor = [0] * len(rows)
        waiting: dict[int, int] = {}
        runnable = list(range(len(rows)))
        done = 0
        while runnable:
            rank = runnable.pop()
            row, at, now = rows[rank], cursor[rank], now_on[rank]
            first, stop = at, len(row)
            while at < stop:
                task = row[at]
                feeding = source[task]
                if feeding >= 0:
                    arrival = end[feeding]
                    if arrival < 0.0:
                        waiting[feeding] = rank
                        break
                    arrival += delay[task]
                    if arrival > now:
                        now = arrival
                start[task] = now
                now += duration[task]
                end[task] = now
                if task in waiting:
                    runnable.append(waiting.pop(task))
                at += 1
            cursor[rank], now_on[rank] = at, now
            done += at - first
        return (start, end) if done == self.num_tasks else None

    def fits(self, rank: int, row: Sequence[int]) -> bool:
        """Whether the rank keeps its memory limit."""
        problem = self.problem
        limit = problem.limit[rank] * (1 + 1e-12) + 1e-9
        held = 0.0
        for task in row:
            kind, stage = self.kind(task), self.stage(task)
            if kind == 0:
                held += problem.activation[stage]
            elif kind == 1:
                held += problem.handover[stage] - problem.activation[stage]
            if held > limit:
                return False
            if kind == 2:
                held -= problem.handover[stage]
        return True

    def table(self, name: str, rows: Rows) -> ActionTable:
        """The order as a table."""
        codes = np.array([kind.code for kind in _KINDS])
        parts = []
        for row in rows:
            tasks = np.array(row, dtype=np.int64)
            kind, rest = np.divmod(tasks, self.per_kind)
            parts.append(Row(codes[kind], *np.divmod(rest, self.problem.num_microbatches)))
        return table_from_rows(name, self.problem.placement, self.problem.num_microbatches, parts)

    def rows_of(self, table: ActionTable) -> Rows:
        """The order of a table, with B as I then W, and a pair as F then those."""
        rows: Rows = []
        for rank in range(table.num_ranks):
            row: list[int] = []
            for index in range(table.offsets[rank], table.offsets[rank + 1]):
                kind = KINDS[table.kind[index]]
                other = kind is OVERLAP_F_B
                stage = int(table.other_stage[index] if other else table.stage[index])
                column = table.other_microbatch if other else table.microbatch
                if kind.forward:
                    row.append(self.task(0, int(table.stage[index]), int(table.microbatch[index])))
                if kind.input_gradient:
                    row.append(self.task(1, stage, int(column[index])))
                if kind.weight_gradient:
                    row.append(self.task(2, stage, int(column[index])))
            rows.append(row)
        return rows

    def task(self, kind: int, stage: int, microbatch: int) -> int:
        return (kind * self.problem.num_stages + stage) * self.problem.num_microbatches + microbatch


def cost_of(rows: Rows, times: tuple[list[float], list[float]], objective: Objective) -> Cost:
    """(makespan, longest span of a rank) or the other way round, as the objective asks."""
    start, end = times
    rows = [row for row in rows if row]
    makespan = max(end[row[-1]] for row in rows) - min(start[row[0]] for row in rows)
    span = max(end[row[-1]] - start[row[0]] for row in rows)
    return (makespan, span) if objective == "makespan" else (span, makespan)
