"""The one place that names private, semi-private or untyped parts of JAX. Tested with jax 0.10.2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jax.sharding import Mesh, PartitionSpec, Sharding


def threefry_block(
    k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The Threefry-2x32-20 block, elementwise over u32 arrays of one shape, as each platform does it best."""
    first, second = threefry2x32_p.bind(k0, k1, x0, x1)  # type: ignore[no-untyped-call]
    return first, second


def barrier(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays, none of which XLA computes, moves or merges across this place."""
    return tuple(lax.optimization_barrier(tuple(arrays))) if arrays else ()  # type: ignore[no-untyped-call]


def shape_struct(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Sharding
) -> jax.ShapeDtypeStruct:
    """An array without content, to lower a function with."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def permute(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """x of rank `source` on rank `target` for each (source, target) along a mesh axis; zeros on the other ranks."""
    moved: jax.Array = lax.ppermute(x, axis, pairs)  # type: ignore[no-untyped-call]
    return moved


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """x of all ranks along a mesh axis, concatenated along `dim`."""
    whole: jax.Array = lax.all_gather(x, axis, axis=dim, tiled=True)
    return whole


def sum_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This rank's part, along `dim`, of the sum of x over the ranks along a mesh axis."""
    part: jax.Array = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)  # type: ignore[no-untyped-call]
    return part


def exchange(x: jax.Array, axis: str, split: int, concat: int, *, tiled: bool = True) -> jax.Array:
    """Part i of x along dimension `split` on rank i of a mesh axis; what a rank gets is joined along `concat`."""
    got: jax.Array = lax.all_to_all(x, axis, split, concat, tiled=tiled)  # type: ignore[no-untyped-call]
    return got


def constrain(x: jax.Array, dims: Sequence[Any]) -> jax.Array:
    """x, annotated for the mesh in context: for each dim axes, None, or UNCONSTRAINED."""
    spec = PartitionSpec(*dims)  # type: ignore[no-untyped-call]
    constrained: jax.Array = lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return constrained


@contextmanager
def own_context(mesh: Mesh | None = None) -> Iterator[None]:
    """A context with 64-bit types and this mesh, or none: not the one the user has set, whose devices are others."""
    with jax.enable_x64(True), jax.set_mesh(mesh):
        yield


def spec(*axes: str | tuple[str, ...]) -> PartitionSpec:
    """The mesh axes that cut each leading dimension, the outermost first; none at all is replicated."""
    return PartitionSpec(*(of_dim or None for of_dim in axes))  # type: ignore[no-untyped-call]
