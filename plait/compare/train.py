"""Training a workload for some steps through one engine: the loss on held-out batches before and after."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from plait.compare.describe import description
from plait.compare.job import Job
from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import UsageError
from plait.core_ir.op import Array
from plait.pipeline import Pipeline
from plait.workloads.workload import Workload, num_tokens

NUM_HELD_OUT = 8
"""Held-out batches that a loss is averaged over."""
TRAIN_SEED, HELD_OUT_SEED = 1, 2


@dataclass(frozen=True)
class AdamW:
    """The optimizer's settings, the same in torch.optim and in optax.

    The rate falls from `lr` in a line to zero over `steps`. Were it constant, rounding that differs between backends
    would grow to differences in the second decimal of a tiny model's loss within a hundred steps.
    """

    steps: int
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01


class Trainer(Protocol):
    """A pipeline with an optimizer."""

    def step(self, batch: Any) -> float:
        """One update; the loss before it."""

    def loss(self, batch: Any) -> float:
        """The loss as the parameters stand."""


def train(
    job: Job,
    workload: Workload,
    pipeline: Pipeline,
    make_trainer: Callable[[Pipeline, AdamW], Trainer],
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """A training row: `job.train_steps` updates from the workload's weights; `progress` hears of each step done."""
    trainer = make_trainer(pipeline, AdamW(job.train_steps))
    held_out = list(islice(workload.stream("held_out", HELD_OUT_SEED), NUM_HELD_OUT))
    before = _mean_loss(trainer, held_out)
    started = time.perf_counter()
    batches = workload.stream("train", TRAIN_SEED)
    for index, batch in enumerate(islice(batches, job.train_steps)):
        trainer.step(batch)
        progress(index + 1)
    seconds = time.perf_counter() - started
    return {
        **description(job, workload, pipeline, job.schedules[0]),
        "steps": job.train_steps,
        "loss_before": before,
        "loss_after": _mean_loss(trainer, held_out),
        "seconds": seconds,
        "tokens_per_second": num_tokens(workload.batch) * job.train_steps / seconds,
    }


def initial_parameters(pipeline: Pipeline) -> dict[str, Array]:
    """The model's parameters by name; `Captured.pack_grads` gives them the structure that `loss_and_grads` takes.

    UsageError where one is not trainable: then that structure lacks it.
    """
    params = [leaf for leaf in pipeline.captured.leaves if leaf.role == "param"]
    frozen = [leaf.name for leaf in params if not leaf.trainable]
    if frozen:
        raise UsageError(
            f"only a model whose parameters are all trainable can be trained: {frozen}"
        )
    values = pipeline.captured.read_leaves()
    return {leaf.name: to_numpy(values[leaf.name]) for leaf in params}


def _mean_loss(trainer: Trainer, batches: list[Any]) -> float:
    return float(np.mean([trainer.loss(batch) for batch in batches]))
