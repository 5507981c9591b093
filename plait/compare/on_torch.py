"""What a worker asks of torch when the torch backend runs: one thread, a process group, memory, an optimizer."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from plait.compare import memory
from plait.compare.job import Job
from plait.compare.machine import check_gpus
from plait.compare.train import AdamW, Trainer, initial_parameters
from plait.core_ir.arrays import to_numpy
from plait.core_ir.op import Array
from plait.core_ir.types import bf16
from plait.extras import load
from plait.pipeline import Pipeline

GROUP_TIMEOUT = datetime.timedelta(minutes=5)


class Host:
    """The device that a worker's pipelines run on."""

    def __init__(self, job: Job) -> None:
        self._cuda = _uses_cuda(job)
        self.device = torch.cuda.get_device_name() if self._cuda else "cpu"

    @property
    def versions(self) -> tuple[str, ...]:
        """The packages whose versions belong to a row."""
        return ("torch",)

    def wait(self, results: Any) -> None:
        """Until every rank has done what was asked of it."""
        if self._cuda:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def reset_peak(self) -> None:
        """Count peak memory anew."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        memory.reset_peak()

    def peak_bytes(self) -> int:
        """The most memory since `reset_peak`: of the GPU, else of the process."""
        return torch.cuda.max_memory_allocated() if self._cuda else memory.peak_bytes()

    def trainer(self, pipeline: Pipeline, adamw: AdamW) -> Trainer:
        """AdamW over the pipeline's parameters."""
        if pipeline.store is not None:
            return StepTrainer(pipeline, adamw)
        return TreeTrainer(pipeline, adamw)


@contextmanager
def host(job: Job) -> Iterator[Host]:
    """The host of this worker, in the process group of its job."""
    torch.set_num_threads(1)
    if job.num_processes == 1:
        yield Host(job)
        return
    if _uses_cuda(job):
        check_gpus(job, torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if _uses_cuda(job) else "gloo", timeout=GROUP_TIMEOUT)
    yield Host(job)
    dist.destroy_process_group()


def _uses_cuda(job: Job) -> bool:
    return job.device != "cpu" and torch.cuda.is_available()


class StepTrainer:
    """Trains a torch model in place: `Pipeline.step` and torch.optim.AdamW over this rank's parameters."""

    def __init__(self, pipeline: Pipeline, adamw: AdamW) -> None:
        self._pipeline = pipeline
        self._optimizer, self._rate = _optimizer(list(pipeline.parameters()), adamw)

    def step(self, batch: Any) -> float:
        """One update; the loss before it."""
        self._optimizer.zero_grad()
        loss = self._pipeline.step(batch)
        self._optimizer.step()
        self._rate.step()
        return float(to_numpy(loss))

    def loss(self, batch: Any) -> float:
        """The loss as the parameters stand."""
        return float(to_numpy(self._pipeline.forward(batch)))


class TreeTrainer:
    """Trains a JAX model on the torch backend: its parameters as tensors by name, which a rank updates where it can."""

    def __init__(self, pipeline: Pipeline, adamw: AdamW) -> None:
        self._pipeline = pipeline
        self._tensors = {n: _tensor(x) for n, x in initial_parameters(pipeline).items()}
        self._optimizer, self._rate = _optimizer(list(self._tensors.values()), adamw)
        self._named_gradients = load("jax", "frontends.jax.reference").named_gradients

    def step(self, batch: Any) -> float:
        """One update; the loss before it."""
        loss, grads = self._pipeline.loss_and_grads(batch, self._params)
        self._optimizer.zero_grad()
        for name, grad in self._named_gradients(grads).items():
            self._tensors[name].grad = _tensor(grad)
        self._optimizer.step()
        self._rate.step()
        return float(to_numpy(loss))

    def loss(self, batch: Any) -> float:
        """The loss as the parameters stand."""
        return float(to_numpy(self._pipeline.forward(batch, self._params)))

    @property
    def _params(self) -> Any:
        arrays = {name: to_numpy(tensor) for name, tensor in self._tensors.items()}
        return self._pipeline.captured.pack_grads(arrays)


def _optimizer(parameters: list[torch.Tensor], adamw: AdamW) -> tuple[torch.optim.AdamW, LambdaLR]:
    optimizer = torch.optim.AdamW(
        parameters,
        lr=adamw.lr,
        betas=adamw.betas,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )
    return optimizer, LambdaLR(optimizer, lambda step: 1 - step / adamw.steps)


def _tensor(array: Array) -> torch.Tensor:
    if array.dtype == bf16.numpy:
        return torch.tensor(array.view("int16")).view(torch.bfloat16)
    return torch.tensor(array)
