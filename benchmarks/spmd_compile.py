"""How long XLA takes for a step as one program: tiny Llama in 8 stages, 32 microbatches, every schedule.

    python benchmarks/spmd_compile.py [SCHEDULE ...]

Seconds of compiling, and the slots that the program holds beside the schedule's peak. Exits with an error when one
takes more than 30 s.
"""

import dataclasses
import os
import sys
import time
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import plait
from plait.core_ir.schedule import recipes
from plait.models.llama import flax as llama
from plait.models.llama.config import CONFIGS, batches

NUM_STAGES, NUM_MICROBATCHES = 8, 32
CONFIG = dataclasses.replace(CONFIGS["tiny"], num_layers=NUM_STAGES)
MOST_SECONDS = 30.0


def main(names: list[str]) -> bool:
    """Compile and run one step under each schedule; True if one took too long."""
    slow = False
    print(f"{'schedule':18} ranks  peak  compile s  first step s")
    for name in names or [recipe.name for recipe in recipes()]:
        pipeline, batch = compiled(name)
        started = time.perf_counter()
        loss, _ = pipeline.loss_and_grads(batch)
        jax.block_until_ready(loss)
        first = time.perf_counter() - started
        seconds = pipeline.engine.compile_seconds
        slow |= seconds > MOST_SECONDS
        peak = max(pipeline.schedule.simulate(plait.Times(1, 1, 1)).peak_activations)
        ranks = pipeline.schedule.num_ranks
        print(f"{name:18} {ranks:5} {peak:5} {seconds:10.1f} {first:13.1f}", flush=True)
    return slow


def compiled(name: str) -> tuple[plait.Pipeline, object]:
    """The model for a schedule on as many ranks as fill 8 stages, and a batch."""
    batch = next(batches(CONFIG, "train", NUM_MICROBATCHES, seed=0))
    cuts = CONFIG.cuts(NUM_STAGES)
    pipeline = plait.compile(
        partial(llama.loss_fn, cuts=cuts, boundary=plait.stage_boundary),
        llama.build(CONFIG),
        batch,
        schedule=name,
        num_microbatches=NUM_MICROBATCHES,
        engine="spmd",
    )
    return pipeline, batch


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
