"""Measuring how long the tasks of each stage take, and messages between stages."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from plait.backends.order import TaskOf, reads
from plait.backends.runtime import Plan, StepInputs
from plait.backends.step import Step
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule.ir import Action
from plait.core_ir.schedule.times import PerEdge, Times

PROFILE_ROUNDS = 5
TRANSFER_ROUNDS = 10

_Key = TypeVar("_Key")

Wait: TypeAlias = Callable[[Any], object]
"""Returns once the arrays it is given are there."""


class TaskRun(NamedTuple):
    """When one task ran, in seconds by a clock that all runs of a round share."""

    task: TaskOf
    start: float
    end: float


class TaskTimer:
    """Makes steps that time their tasks, with all that the runtime does for each. Every step is a round.

    rounds: the tasks that ran, pairs one after the other. pair_rounds: of F&B tasks the stage of the forward and the
    seconds.
    """

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self.rounds: list[list[TaskRun]] = []
        self.pair_rounds: list[list[tuple[int, float]]] = []

    def steps(
        self, plan: Plan, inputs: StepInputs, num_rounds: int = PROFILE_ROUNDS
    ) -> Iterator[Step]:
        """Steps to run, one after the other, whose tasks are timed; a program with pairs then runs these as one."""
        apart = replace(plan, pairs={})
        for _ in range(num_rounds):
            self.rounds.append([])
            yield _TimedStep(apart, inputs, self._wait, self.rounds[-1])
        for _ in range(num_rounds if plan.program.pairs else 0):
            self.pair_rounds.append([])
            yield _StepOfPairs(plan, inputs, self._wait, self.pair_rounds[-1])

    def shifted(self, seconds: float) -> list[list[TaskRun]]:
        """The rounds by a clock that is so much ahead."""
        return [
            [TaskRun(task, start + seconds, end + seconds) for task, start, end in runs]
            for runs in self.rounds
        ]


class _TimedStep(Step):
    """Waits for what a task reads, then notes how long it takes until all it makes and adds to is there."""

    def __init__(self, plan: Plan, inputs: StepInputs, wait: Wait, runs: list[TaskRun]) -> None:
        super().__init__(plan, inputs)
        self._wait, self._runs = wait, runs

    def run_task(self, stage: int, kind: TaskKind, microbatch: int) -> Any:
        self._wait(list(self._envs.get((stage, microbatch), {}).values()))
        started = time.perf_counter()
        made = super().run_task(stage, kind, microbatch)
        self._wait([*made, *self.gradients().values()])
        self._runs.append(TaskRun((kind, stage, microbatch), started, time.perf_counter()))
        return made


class _StepOfPairs(Step):
    """Times F&B tasks alone."""

    def __init__(
        self, plan: Plan, inputs: StepInputs, wait: Wait, runs: list[tuple[int, float]]
    ) -> None:
        super().__init__(plan, inputs)
        self._wait, self._runs = wait, runs

    def run_pair(self, action: Action) -> Any:
        for part in action.parts:
            self._wait(list(self._envs.get((part.stage, part.microbatch), {}).values()))  # type: ignore[arg-type]
        started = time.perf_counter()
        made = super().run_pair(action)
        self._wait([*made, *self.gradients().values()])
        assert action.stage is not None
        self._runs.append((action.stage, time.perf_counter() - started))
        return made


def task_times(
    rounds: Iterable[Iterable[TaskRun]],
    num_stages: int,
    pair_rounds: Iterable[Iterable[tuple[int, float]]] = (),
    *,
    comm: float = 0.0,
    transfer: PerEdge = 0.0,
) -> Times:
    """Times by stage: of each task the mean over the microbatches of a round, and the median of that over rounds.

    The mean, because a step is as long as the sum of its tasks, slow ones too.
    """
    means = _over_rounds(
        [((run.task[1], run.task[0]), run.end - run.start) for run in runs] for runs in rounds
    )
    f, i, w = (
        [means.get((stage, kind), 0.0) for stage in range(num_stages)] for kind in ("F", "I", "W")
    )
    pairs = _over_rounds(pair_rounds)
    apart = map(sum, zip(f, i, w, strict=True))
    fb = [pairs.get(stage, seconds) for stage, seconds in enumerate(apart)] if pairs else None
    return Times(f=f, i=i, w=w, fb=fb, comm=comm, transfer=transfer, early=True)


def transfer_times(
    rounds: Iterable[Iterable[TaskRun]],
    program: Program,
    placement: Sequence[int],
    alone: Mapping[tuple[int, int], float],
) -> dict[tuple[int, int], float]:
    """How long messages take while the ranks compute, by (source stage, target stage): summed up as `task_times`.

    Told by the tasks that their rank had to wait for: those it was free for before the last message it read could be
    there. `alone` is what a message takes when nothing else runs, and the answer where no task had to wait.
    """
    waited = _over_rounds(_waited_for(runs, program, placement, alone) for runs in rounds)
    return {pair: max(seconds, waited.get(pair, 0.0)) for pair, seconds in alone.items()}


def median_seconds(run: Callable[[], object], num_rounds: int = TRANSFER_ROUNDS) -> float:
    """How long a call takes."""
    samples = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _waited_for(
    runs: Iterable[TaskRun],
    program: Program,
    placement: Sequence[int],
    alone: Mapping[tuple[int, int], float],
) -> list[tuple[tuple[int, int], float]]:
    """(pair of stages, seconds) of the messages of one round that a rank waited for."""
    found = []
    in_time = sorted(runs, key=lambda run: run.start)
    ends = {run.task: run.end for run in in_time}
    free: dict[int, float] = {}
    for run in in_time:
        stage = run.task[1]
        rank = placement[stage]
        sent = [task for task in reads(run.task, program) if placement[task[1]] != rank]
        if sent and rank in free:
            last = max(sent, key=ends.__getitem__)
            pair = last[1], stage
            if free[rank] < ends[last] + alone[pair]:
                found.append((pair, run.start - ends[last]))
        free[rank] = run.end
    return found


def _over_rounds(rounds: Iterable[Iterable[tuple[_Key, float]]]) -> dict[_Key, float]:
    """Of each key the mean within a round, then the median of the rounds that have it."""
    means: dict[_Key, list[float]] = {}
    for samples in rounds:
        by_key: dict[_Key, list[float]] = {}
        for key, seconds in samples:
            by_key.setdefault(key, []).append(seconds)
        for key, seconds_of in by_key.items():
            means.setdefault(key, []).append(statistics.fmean(seconds_of))
    return {key: statistics.median(found) for key, found in means.items()}
