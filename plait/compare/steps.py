"""What each transformation is worth: the simulated step from one without any overlap to one with all of it.

    baseline      collectives stop compute, backwards are whole, parameters are gathered before the first task and
                  gradients reduced behind the last one
    + split       weight gradients are tasks of their own, and messages do not wait for them
    + sharding    gathering and reducing are tasks, beside compute
    + multiplex   a forward and a backward that the schedule pairs are one graph, in the order of its halves
    + overlap     equations are ordered so that collectives run beside compute, within tasks and pairs

Each step keeps those before it. What a schedule does not have, pairs, say, changes nothing.
"""

from dataclasses import replace

import numpy as np

from plait.core_ir.cost import seconds_on
from plait.core_ir.hardware import Hardware
from plait.core_ir.mesh import Mesh
from plait.core_ir.passes.multiplex import multiplex_pairs
from plait.core_ir.passes.overlap import overlap_pairs, overlap_tasks
from plait.core_ir.program import STEP_KINDS, Program, Stage
from plait.core_ir.schedule.estimate import estimate, simulate_program
from plait.core_ir.schedule.schedule import Schedule
from plait.core_ir.schedule.times import PerStage, Times

STEPS = ("baseline", "+ split", "+ sharding", "+ multiplex", "+ overlap")


def overlapped(
    program: Program, schedule: Schedule, hardware: Hardware, mesh: Mesh | None
) -> Program:
    """The program as it runs under a schedule: pairs joined, tasks and pairs ordered, by the hardware's times."""
    seconds = seconds_on(hardware, mesh)
    joined = multiplex_pairs(program, schedule.pairs)
    return overlap_pairs(overlap_tasks(joined, seconds), schedule.pairs, seconds)


def step_by_step(
    program: Program,
    schedule: Schedule,
    hardware: Hardware,
    mesh: Mesh | None,
    overlapped_seconds: float,
) -> dict[str, float]:
    """Seconds of a step after each of STEPS.

    program: its tasks in the order in which they were captured: every wait stands behind its start. overlapped_seconds:
    of a step of what `overlapped` gives.
    """
    apart, _ = estimate(program, schedule.placement, hardware, mesh)
    whole = replace(apart, i=_sum(apart.i, apart.w), w=0.0, fb=None)
    blocked = _of_ranks(apart, schedule)
    found = {
        "baseline": _step(whole, program, schedule, sharded=False) + blocked,
        "+ split": _step(replace(apart, fb=None), program, schedule, sharded=False) + blocked,
        "+ sharding": _step(replace(apart, fb=None), program, schedule),
    }
    joined = multiplex_pairs(program, schedule.pairs)
    together, _ = estimate(joined, schedule.placement, hardware, mesh)
    found["+ multiplex"] = _step(together, program, schedule)
    found["+ overlap"] = overlapped_seconds
    return found


def _step(times: Times, program: Program, schedule: Schedule, *, sharded: bool = True) -> float:
    if not sharded:
        program = _without_step_tasks(program)
        times = replace(times, unshard=0.0, reduce_grad=0.0)
    return float(simulate_program(schedule, program, times).makespan)


def _without_step_tasks(program: Program) -> Program:
    stages = (
        Stage(stage.index, {k: task for k, task in stage.tasks.items() if k not in STEP_KINDS})
        for stage in program.stages
    )
    return replace(program, stages=tuple(stages))


def _of_ranks(times: Times, schedule: Schedule) -> float:
    """What gathering and reducing take on the rank that has most of it."""
    stages = np.broadcast_to(_sum(times.unshard, times.reduce_grad), schedule.num_stages)
    of_rank = np.zeros(schedule.num_ranks)
    np.add.at(of_rank, np.array(schedule.placement), stages)
    return float(of_rank.max())


def _sum(a: PerStage, b: PerStage) -> list[float]:
    return [float(x) for x in np.atleast_1d(np.asarray(a) + np.asarray(b))]
