"""What a worker asks of JAX when the jax backend runs: memory, an optimizer, trees."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from plait.compare import memory
from plait.compare.job import Job
from plait.compare.train import AdamW, Trainer, initial_parameters
from plait.core_ir.arrays import to_numpy
from plait.pipeline import Pipeline


class Host:
    """The devices that a worker's pipelines run on."""

    def __init__(self, job: Job) -> None:
        self._devices = jax.devices(job.device)
        kind = self._devices[0]
        self.device = "cpu" if kind.platform == "cpu" else kind.device_kind

    @property
    def versions(self) -> tuple[str, ...]:
        """The packages whose versions belong to a row."""
        return ("jax", "jaxlib")

    def wait(self, results: Any) -> None:
        """Until the results are there."""
        jax.block_until_ready(results)  # type: ignore[no-untyped-call]

    def reset_peak(self) -> None:
        """Count peak memory anew; a GPU counts from the start of the process."""
        memory.reset_peak()

    def peak_bytes(self) -> int:
        """The most memory since `reset_peak`: of the fullest device where it says so, else of the process."""
        stats = [device.memory_stats() for device in self._devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return max(peaks, default=0) or memory.peak_bytes()

    def trainer(self, pipeline: Pipeline, adamw: AdamW) -> Trainer:
        """AdamW over the pipeline's parameters."""
        return OptaxTrainer(pipeline, adamw)


@contextmanager
def host(job: Job) -> Iterator[Host]:
    """The host of this worker."""
    yield Host(job)


class OptaxTrainer:
    """Trains a model of either framework as a tree of JAX arrays, by optax.adamw.

    Each leaf has a state of its own: gradients live where their stages run, and one program cannot mix devices.
    """

    def __init__(self, pipeline: Pipeline, adamw: AdamW) -> None:
        self._pipeline = pipeline
        arrays = {name: jnp.asarray(x) for name, x in initial_parameters(pipeline).items()}
        leaves, self._treedef = jax.tree.flatten(pipeline.captured.pack_grads(arrays))
        b1, b2 = adamw.betas
        rate = optax.linear_schedule(adamw.lr, 0.0, adamw.steps)
        self._optimizer = optax.adamw(
            rate, b1=b1, b2=b2, eps=adamw.eps, weight_decay=adamw.weight_decay
        )
        self._leaves = [(leaf, self._optimizer.init(leaf)) for leaf in leaves]
        self._update = jax.jit(self._updated)

    def step(self, batch: Any) -> float:
        """One update; the loss before it."""
        loss, grads = self._pipeline.loss_and_grads(batch, self._params)
        # optax corrects the bias by 1 - b2**count: in f32 that is wrong by 1e-5, a hundred times the rounding.
        with jax.enable_x64(True):
            self._leaves = [
                self._update(leaf, state, grad)
                for (leaf, state), grad in zip(self._leaves, jax.tree.leaves(grads), strict=True)
            ]
        return float(to_numpy(loss))

    def loss(self, batch: Any) -> float:
        """The loss as the parameters stand."""
        return float(to_numpy(self._pipeline.forward(batch, self._params)))

    @property
    def _params(self) -> Any:
        return jax.tree.unflatten(self._treedef, [leaf for leaf, _ in self._leaves])

    def _updated(self, leaf: Any, state: Any, grad: Any) -> tuple[Any, Any]:
        update, state = self._optimizer.update(grad, state, leaf)
        return optax.apply_updates(leaf, update), state
