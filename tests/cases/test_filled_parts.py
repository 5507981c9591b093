"""Parts that are filled with one number, another on each rank: read whole, as a loss and as aux."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import plait

RNG = np.random.default_rng(0)
W, X = (0.3 * RNG.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 8)))
A = RNG.normal(size=(2, 3)).astype(np.float32)
OPTIONS: dict[str, Any] = {"num_microbatches": 1, "mesh": {"stage": 2, "tensor": 2}}


PARTS = P("tensor")


def mapped(function: Callable[..., Any], given: Any = PARTS) -> Any:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=PARTS)


@pytest.mark.parametrize(
    "read",
    [
        lambda r: r[0] + 3 * r[1],
        lambda r: r.max(),
        lambda r: jnp.sort(r)[0],
        jax.nn.logsumexp,
        lambda r: (r @ A).sum(),
        lambda r: r.mean(),
    ],
    ids=["rows", "max", "sort", "logsumexp", "product", "mean"],
)
@pytest.mark.parametrize("engine", ["mpmd", "local"])
def test_a_loss_of_each_ranks_own(engine: str, read: Callable[..., Any]) -> None:
    own = mapped(lambda x: (x**2).mean()[None])

    def loss(w: Any, x: Any) -> Any:
        return read(own(plait.stage_boundary(x @ w)))

    wanted, grads = jax.value_and_grad(loss)(jnp.asarray(W), X)
    codegen = "eager" if engine == "local" else None
    backend = "torch" if engine == "local" else "jax"
    pipeline = plait.compile(loss, W, X, backend=backend, engine=engine, codegen=codegen, **OPTIONS)
    found, found_grads = pipeline.loss_and_grads(X)
    np.testing.assert_allclose(plait.to_numpy(found), wanted, rtol=1e-6)
    np.testing.assert_allclose(plait.to_numpy(found_grads), grads, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "own",
    [
        mapped(lambda x: lax.axis_index("tensor")[None]),
        mapped(lambda x: x.sum()[None]),
        mapped(lambda x: jnp.broadcast_to(x.sum(), (3,))),
        mapped(lambda x: lax.ppermute(lax.axis_index("tensor"), "tensor", [(0, 1), (1, 0)])[None]),
        mapped(lambda x: jnp.take(x.sum(0), lax.axis_index("tensor"))[None], P()),
        mapped(lambda x: jnp.where(lax.axis_index("tensor") == 0, x.sum(), x.mean())[None]),
    ],
    ids=["place", "sum", "filled", "permuted", "taken", "chosen"],
)
def test_aux_of_each_ranks_own(own: Callable[..., Any]) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(plait.stage_boundary(x @ w) ** 2), own(x)

    pipeline = plait.compile(loss, W, X, has_aux=True, **OPTIONS)
    (_, aux), _ = pipeline.loss_and_grads(X)
    np.testing.assert_allclose(plait.to_numpy(aux)[0], np.asarray(own(X)), rtol=1e-6)
