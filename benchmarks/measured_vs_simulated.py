"""A step's measured time beside the one simulated from measured task and transfer times, for every schedule.

    python benchmarks/measured_vs_simulated.py [--codegen eager] [--steps N] [--schedule NAME,...] [--sleep]

Llama on two gloo ranks of one thread each, 8 microbatches; medians. Exits with an error when a simulated time is off by
more than 15 %, which takes two cores that do nothing else: a task that computes gets slower with every other process.
With --sleep tasks last a fixed time and compute nothing more, so that what is left is the runtime and its messages.
"""

import argparse
import dataclasses
import socket
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import plait
from plait.core_ir.schedule import recipes
from plait.models.llama.config import CONFIGS, batches
from plait.models.llama.torch import build, loss_fn

NUM_RANKS, NUM_MICROBATCHES = 2, 8
CONFIG = dataclasses.replace(CONFIGS["tiny"], dim=256, hidden_dim=688, seq_len=256)
SLEEP_SECONDS = {"F": 0.04, "I": 0.044, "W": 0.036}
MOST_OFF = 0.15


def main() -> int:
    """Start the ranks; the first prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--codegen", default="inductor")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--schedule", default=",".join(recipe.name for recipe in recipes()))
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(run_rank, (address, options, results), NUM_RANKS)
    return int(results.get() > MOST_OFF)


def run_rank(rank: int, address: str, options: argparse.Namespace, results: Any) -> None:
    """Measure and simulate every schedule; rank 0 prints each and gives the largest difference."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_RANKS)
    if rank == 0:
        print(f"{'schedule':18} stages  measured ms  simulated ms  simulated / measured")
    most_off = 0.0
    for name in options.schedule.split(","):
        pipeline, batch = compiled(name, options.codegen)
        if options.sleep:
            make_tasks_sleep(pipeline)
        pipeline.profile(batch)
        measured = step_seconds(pipeline, batch, options.steps)
        simulated = pipeline.simulate().makespan
        ratio = simulated / measured
        most_off = max(most_off, abs(ratio - 1))
        if rank == 0:
            stages = pipeline.program.num_stages
            print(
                f"{name:18} {stages:6} {1e3 * measured:12.1f} {1e3 * simulated:13.1f} {ratio:21.3f}",
                flush=True,
            )
    if rank == 0:
        results.put(most_off)
    dist.destroy_process_group()


def compiled(name: str, codegen: str) -> tuple[plait.Pipeline, Any]:
    """The model for a schedule, with as many stages as it has on these ranks, and a batch."""
    num_stages = next(r.stages_per_rank for r in recipes() if r.name == name) * NUM_RANKS
    arrays = next(batches(CONFIG, "train", 2 * NUM_MICROBATCHES, seed=0))
    batch = {key: torch.tensor(array) for key, array in arrays.items()}
    pipeline = plait.compile(
        loss_fn,
        build(CONFIG),
        batch,
        split=[f"layers.{cut}" for cut in CONFIG.cuts(num_stages)],
        schedule=name,
        num_ranks=NUM_RANKS,
        num_microbatches=NUM_MICROBATCHES,
        engine="distributed",
        codegen=codegen,
    )
    return pipeline, batch


def make_tasks_sleep(pipeline: plait.Pipeline) -> None:
    """Have every task last what SLEEP_SECONDS says, shared by the stages of a rank; the last stage takes longer."""
    tasks = pipeline.engine._plan.tasks  # type: ignore[attr-defined]
    num_stages = pipeline.program.num_stages
    for (stage, kind), task in list(tasks.items()):
        share = NUM_RANKS / num_stages * (1.2 if stage == num_stages - 1 else 1.0)
        tasks[stage, kind] = slept(task, SLEEP_SECONDS[kind] * share)


def slept(task: Any, seconds: float) -> Any:
    """The task, and sleep until it has lasted so long."""

    def run(operands: list[Any]) -> Any:
        end = time.perf_counter() + seconds
        outputs = task(operands)
        time.sleep(max(0.0, end - time.perf_counter()))
        return outputs

    return run


def step_seconds(pipeline: plait.Pipeline, batch: Any, num_steps: int) -> float:
    """The median over steps, after two that do not count, from all ranks ready to all ranks done."""
    seconds = []
    for _ in range(num_steps + 2):
        dist.barrier()
        started = time.perf_counter()
        pipeline.loss_and_grads(batch)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    sys.exit(main())
