"""A worker: one process of a job. `python -m plait.compare.worker`, the job as a line of JSON on standard input.

It ends when its standard input is closed, so that it never outlives the process that started it.
"""

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable

from plait.compare.events import MISUSES, Channel
from plait.compare.job import Job, stages_of
from plait.compare.measure import compile_workload, compute_reference, measure
from plait.compare.train import AdamW, Trainer, train
from plait.core_ir.errors import PlaitError
from plait.extras import Framework, load
from plait.frontends.reference import Reference
from plait.pipeline import Pipeline
from plait.workloads.workload import Sizes, Workload, load_workload


def main() -> None:
    """Run the job of standard input; report; end with code 1, at once, if it fails."""
    channel = Channel()
    job = Job.from_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(job, channel)
    except Exception as error:
        expected = isinstance(error, PlaitError)
        if not expected:
            traceback.print_exc()
            sys.stderr.flush()
        misuse = isinstance(error, MISUSES)
        kind = type(error).__name__
        channel.send("error", kind=kind, message=str(error), expected=expected, misuse=misuse)
        # Threads that wait for other ranks would hold up an orderly end.
        os._exit(1)


def run(job: Job, channel: Channel) -> None:
    """Measure every row of the job, then train."""
    framework: Framework = "torch" if job.backend == "torch" else "jax"
    workloads = functools.cache(functools.partial(_workload, job))
    with load(framework, f"compare.on_{framework}").host(job) as host:
        done = 0
        for frontend in job.frontends if job.steps else ():
            reference: Callable[[], Reference] | None = None
            for schedule in job.schedules:
                workload = workloads(frontend, schedule)
                if reference is None:  # equal for every schedule
                    reference = functools.cache(functools.partial(compute_reference, job, workload))
                label = f"{workload.frontend} on {job.name}, {schedule}"

                def progress(what: str, label: str = label, done: int = done) -> None:
                    channel.send("progress", what=f"{label}: {what}", done=done, total=job.num_rows)

                row = measure(job, workload, schedule, host, reference, progress)
                channel.send("row", row=row)
                done += 1
        if job.train_steps:
            _train(job, workloads(job.train_frontend, job.schedules[0]), host.trainer, channel)


def _workload(job: Job, frontend: str | None, schedule: str) -> Workload:
    stages = stages_of(schedule, job.num_ranks)
    sizes = Sizes(job.config, job.dtype, job.batch_size, stages, job.mesh or {}, job.changes)
    return load_workload(job.model, frontend, sizes, job.split)


def _train(
    job: Job,
    workload: Workload,
    make_trainer: Callable[[Pipeline, AdamW], Trainer],
    channel: Channel,
) -> None:
    what = f"{workload.frontend} on {job.name}: training"

    def progress(done: int) -> None:
        channel.send("progress", what=what, done=done, total=job.train_steps)

    progress(0)
    pipeline = compile_workload(job, workload, job.schedules[0])
    channel.send("training", row=train(job, workload, pipeline, make_trainer, progress))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
