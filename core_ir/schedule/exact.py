"""The optimum of a small problem by constraint programming: what a search is measured against.

The one module that needs OR-tools (`pip install 'plait[exact]'`).
"""

import math
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from plait.core_ir.errors import MissingExtraError, ScheduleError
from plait.core_ir.schedule.ir import ActionTable
from plait.core_ir.schedule.order import Clock
from plait.core_ir.schedule.problem import Objective, Problem, pose
from plait.core_ir.schedule.recipe import Request

# The solver, None where the extra is not installed.
_cp: Any = import_module("ortools.sat.python.cp_model") if find_spec("ortools") else None

# Times and amounts are counted in whole parts of this size of their unit.
_PARTS = 1000


class Exact(NamedTuple):
    """A schedule of I and W apart, its cost, and what no such schedule can beat."""

    table: ActionTable
    cost: float
    bound: float


def solve(
    request: Request,
    placement: Sequence[int],
    *,
    objective: Objective = "makespan",
    seconds: float = 60.0,
) -> Exact:
    """The best order of F, I and W on `placement`; it is the optimum where cost equals bound.

    For some dozens of tasks; times and memory must be whole thousandths of their unit.

    Raises `MissingExtraError` without OR-tools, `ScheduleError` when nothing keeps the memory limit
    or nothing was found in `seconds`.
    """
    if _cp is None:
        raise MissingExtraError(
            "the exact search needs OR-tools; install it with: pip install 'plait[exact]'"
        )
    problem = pose(request, placement, request.memory_limit)
    model = _cp.CpModel()
    starts, goal = _state(model, problem, objective)
    model.minimize(goal)
    solver = _cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status not in (_cp.OPTIMAL, _cp.FEASIBLE):
        raise ScheduleError(
            f"the exact search found no schedule in {seconds:g} s: {solver.status_name(status)}"
        )
    clock = Clock(problem)
    when = [(solver.value(start), clock.duration[task] > 0, task) for task, start in starts.items()]
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    # Tasks without a time go before one that starts with them.
    for _, _, task in sorted(when):
        rows[problem.placement[clock.stage(task)]].append(task)
    return Exact(
        clock.table("exact", rows),
        solver.objective_value / _PARTS,
        solver.best_objective_bound / _PARTS,
    )


def _state(model: Any, problem: Problem, objective: Objective) -> tuple[dict[int, Any], Any]:
    """Variables, constraints, and the variable to be made small; starts by task of `order`."""
    clock = Clock(problem)
    m, num_stages = problem.num_microbatches, problem.num_stages
    duration = [_parts(time, "times") for time in clock.duration]
    delay = [_parts(time, "transfers") for time in clock.delay]
    horizon = sum(duration) + sum(delay)
    start = {
        task: model.new_int_var(0, horizon, f"start {task}") for task in range(clock.num_tasks)
    }
    end = {task: start[task] + duration[task] for task in start}

    for stage in range(num_stages):
        for microbatch in range(m):
            f, i, w = (clock.task(kind, stage, microbatch) for kind in range(3))
            model.add(start[i] >= end[f])
            model.add(start[w] >= end[i])
            for task in (f, i, w):
                if clock.source[task] >= 0:
                    model.add(start[task] >= end[clock.source[task]] + delay[task])
                if microbatch:
                    model.add(start[task] >= end[task - 1])

    goal = model.new_int_var(0, horizon, "cost")
    for rank in range(problem.num_ranks):
        stages = problem.stages_of(rank)
        tasks = [task for task in start if clock.stage(task) in stages]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(start[task], duration[task], f"run {task}")
            for task in tasks
        )
        _bound_memory(model, clock, rank, start, end, horizon)
        # True of any order, but the solver sees it late.
        model.add(goal >= sum(duration[task] for task in tasks))
        firsts = [start[clock.task(0, stage, 0)] for stage in stages]
        for stage in stages:
            last = end[clock.task(2, stage, m - 1)]
            begins = firsts if objective == "span" else [0]
            for begin in begins:
                model.add(goal >= last - begin)
    return start, goal


def _bound_memory(
    model: Any,
    clock: Clock,
    rank: int,
    start: dict[int, Any],
    end: dict[int, Any],
    horizon: int,
) -> None:
    problem = clock.problem
    if math.isinf(problem.limit[rank]):
        return
    held, amounts = [], []
    for stage in problem.stages_of(rank):
        for microbatch in range(problem.num_microbatches):
            f, i, w = (clock.task(kind, stage, microbatch) for kind in range(3))
            for first, last, amount in (
                (start[f], end[i], problem.activation[stage]),
                (end[i], end[w], problem.handover[stage]),
            ):
                length = model.new_int_var(0, horizon, "")
                held.append(model.new_interval_var(first, length, last, ""))
                amounts.append(_parts(amount, "memory"))
    model.add_cumulative(held, amounts, _parts(problem.limit[rank], "memory", down=True))


def _parts(value: float, what: str, down: bool = False) -> int:
    parts = math.floor(value * _PARTS + 1e-6) if down else round(value * _PARTS)
    if not down and abs(parts - value * _PARTS) > 1e-6:
        raise ScheduleError(
            f"the exact search counts {what} in whole thousandths of their unit, got {value!r};"
            " round them first"
        )
    return parts
