"""Losses that are mapped over a mesh: captured, run on every rank, whole and task by task, against JAX on devices."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_checks import random
from mesh_checks import check, collectives, jax_mesh

from plait.frontends.jax.boundary import stage_boundary

X = random((4, 6))
MLP = {
    "w1": random((6, 8), low=-1, high=1),
    "w2": random((8, 6), low=-1, high=1),
    "b1": random((8,)),
    "b2": random((6,)),
}
SPECS = {"w1": P(None, "model"), "w2": P("model"), "b1": P("model"), "b2": P()}


def mlp(p: Any, x: Any) -> Any:
    """A column-parallel and a row-parallel layer."""
    return lax.psum(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"], "model") + p["b2"]


@pytest.mark.parametrize("vma", [True, False])
def test_a_tensor_parallel_mlp(vma: bool) -> None:
    mesh = jax_mesh(model=4)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        y = stage_boundary(layer(p["first"], x))
        return jnp.mean(layer(p["second"], y) ** 2)

    captured = check(loss, {"first": MLP, "second": MLP}, X, {"model": 4})
    assert captured.num_cuts == 1
    assert captured.layouts == {
        f"{layer}.{name}": layout
        for layer in ("first", "second")
        for name, layout in (("w1", ((), ("model",))), ("w2", (("model",),)), ("b1", (("model",),)))
    }
    print(collectives(captured))
