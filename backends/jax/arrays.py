"""Arrays on the submesh of each stage, as the runtime handles them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from plait.backends.jax.private import own_context
from plait.backends.jax.submesh import Spread, Spreads, Submesh
from plait.core_ir.arrays import is_torch, to_numpy
from plait.core_ir.types import TensorType


@dataclass(frozen=True)
class Given:
    """An array that a step is given, and how it is to be spread."""

    array: Any
    spread: Spread


class JaxArrays:
    """Arrays on the submesh of each stage."""

    def __init__(self, submeshes: Sequence[Submesh], spreads: Spreads | None = None) -> None:
        self._submeshes, self._spreads = tuple(submeshes), spreads or Spreads()
        self._add = jax.jit(jnp.add, donate_argnums=0)

    def zeros(self, type: TensorType, stage: int) -> jax.Array | Given:
        """Zeros of a type, on each device; on auto axes they lie nowhere yet, until something is added or they move."""
        spread = self._spreads.by_device
        whole = self._submeshes[stage].type(type, spread)
        if self._spreads.has_auto:
            return Given(np.broadcast_to(np.zeros((), whole.dtype.numpy), whole.shape), spread)
        return self.put(np.zeros(whole.shape, whole.dtype.numpy), stage, spread)

    def scalar(self, number: float, type: TensorType, stage: int) -> jax.Array:
        """A number in that type, the same on each device."""
        return self.put(np.full(type.shape, number, type.dtype.numpy), stage, Spread())

    def key(self, words: NDArray[np.uint32], stage: int) -> jax.Array:
        """A u32[2] key, or one for each part of a microbatch."""
        return self.put(words, stage, self._spreads.by_part)

    def add(self, total: jax.Array | Given, part: jax.Array) -> jax.Array:
        """total + part; `total` is donated."""
        if isinstance(total, Given):
            total = jax.device_put(total.array, part.sharding)
        with own_context():
            added: jax.Array = self._add(total, part)
        return added

    def move(self, array: Any, stage: int) -> jax.Array:
        """The array on the stage's submesh, spread as it was; itself when it is there."""
        if isinstance(array, Given):
            return self.put(array.array, stage, array.spread)
        submesh = self._submeshes[stage]
        if submesh.mesh is None:
            return self.put(on_host(array), stage, Spread())
        moved: jax.Array = jax.device_put(array, NamedSharding(submesh.mesh, array.sharding.spec))
        return moved

    def stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Along a new dim 0 of what each device holds."""
        return jnp.stack(list(parts), axis=int(self._spreads.mesh is not None))

    def put(self, array: Any, stage: int, spread: Spread) -> jax.Array:
        """A spread array where a stage runs."""
        placed: jax.Array = jax.device_put(array, self._submeshes[stage].where(spread))
        return placed


def on_host(array: Any) -> Any:
    """A torch tensor as a NumPy array, any other array as it is."""
    return to_numpy(array) if is_torch(array) else array


def content(array: Any) -> Any:
    """What a step is given, without how it is spread."""
    return array.array if isinstance(array, Given) else on_host(array)
