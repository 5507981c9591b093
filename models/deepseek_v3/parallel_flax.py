"""DeepSeek-V3 in Flax over a mesh of devices: the model of `flax.py`, its parameters and its loss, by `shard_map`.

Over the *expert axis* routed experts are cut, and so is the batch: a rank runs all else on its own tokens, and tokens
go to their experts and back in an all-to-all (arXiv 2006.16668). With a `capacity_factor` each rank drops tokens by
the loads of its own ones.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from plait.models.deepseek_v3 import flax
from plait.models.deepseek_v3.flax import Boundary, DeepSeekV3, no_boundary
from plait.models.deepseek_v3.moe.flax import Exchange, MoE

AXES = ("expert",)
"""What the axes are called over which `loss_fn_over` cuts."""


def loss_fn_over(mesh: Any) -> Any:
    """The loss over a mesh with AXES."""
    return partial(loss_fn, mesh=mesh)


def loss_fn(
    model: DeepSeekV3,
    batch: Mapping[str, Array],
    *,
    mesh: Any,
    axis: str = "expert",
    cuts: Sequence[int] = (),
    boundary: Boundary = no_boundary,
) -> Array:
    """The loss of `flax.loss_fn`, and what it adds to the routers' `counts`; `boundary` is called on every rank.

    ValueError where experts do not divide over the ranks of the axis.
    """
    model.config.check_mesh({"expert": mesh.shape[axis]})
    graphdef, params, buffers = _split(model)

    def on_rank(params: Any, buffers: Any, batch: Mapping[str, Array]) -> tuple[Array, Any]:
        local = nnx.merge(graphdef, params, buffers, copy=True)
        local.set_attributes(MoE, exchange=exchange_over(axis), raise_if_not_found=False)
        loss = flax.loss_fn(local, batch, cuts=cuts, boundary=boundary)
        _, _, buffers = _split(local)
        return lax.pmean(loss, axis), buffers

    mapped = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(param_specs(params, axis), P(), P(axis)),
        out_specs=(P(), P()),
    )
    loss, buffers = mapped(params, buffers, batch)
    nnx.update(model, buffers)
    return loss


def param_specs(params: Any, axis: str) -> Any:
    """How each parameter is cut: those of the routed experts along their first dim, others not."""
    return jax.tree.map_with_path(
        lambda path, _: (
            P(axis)
            if ".experts." in jax.tree_util.keystr(path, simple=True, separator=".")
            else P()
        ),
        params,
    )


def exchange_over(axis: str) -> Exchange:
    """Slots go to the ranks of an axis that have their experts."""
    return Exchange(
        to_experts=lambda slots: lax.all_to_all(slots, axis, 0, 1, tiled=True),
        to_tokens=lambda slots: lax.all_to_all(slots, axis, 1, 0, tiled=True),
        total=lambda counts: lax.psum(counts, axis),
    )


def _split(model: DeepSeekV3) -> Any:
    return nnx.split(model, nnx.Param, ...)
