"""The unpipelined JAX step: `jax.value_and_grad` of the loss, jitted, in a loop over the microbatches."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from plait.core_ir.arrays import is_array, to_numpy
from plait.core_ir.op import Array
from plait.frontends.jax.batch_tree import batch_tree, flatten_batch
from plait.frontends.jax.jaxpr import KEY_IMPL, x64
from plait.frontends.jax.model import view_model
from plait.frontends.jax.trees import named_leaves
from plait.frontends.reference import Reference


def reference(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    num_microbatches: int,
    reduction: Literal["mean", "sum"] = "mean",
    keys: Any = None,
    state: Any = None,
) -> Reference:
    """Loss, gradients and state by leaf name of one step.

    keys: u32[M, 2], the key of each microbatch, for a loss with a keyword `rng`. state: for a loss
    `loss_fn(model, batch, state) -> (loss, new_state)`.
    """
    view = view_model(loss_fn, model, state, batch, has_aux=False)
    data = batch_tree(batch, num_microbatches, x64=view.x64)
    takes_key = "rng" in inspect.signature(loss_fn).parameters
    learned = [type.dtype.is_inexact for type in view.params.types]
    scale = 1 / num_microbatches if reduction == "mean" else 1.0

    @jax.jit
    def step(params: list[Any], buffers: list[Any], arrays: list[Any], key: Any) -> Any:
        rng = {"rng": jax.random.wrap_key_data(key, impl=KEY_IMPL)} if takes_key else {}

        def scaled_loss(differentiated: list[Any]) -> tuple[Any, tuple[Any, list[Any]]]:
            rest = iter(differentiated)
            all_params = [next(rest) if t else p for p, t in zip(params, learned, strict=True)]
            loss, new_buffers, _ = view.call(
                view.params.trace(all_params), view.buffers.trace(buffers), data.build(arrays), rng
            )
            left = _carriers(new_buffers, view.buffers.static) if view.buffers.names else []
            return loss * jnp.asarray(scale, loss.dtype), (loss, left)

        differentiated = [p for p, t in zip(params, learned, strict=True) if t]
        (_, (loss, left)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(differentiated)
        return loss * jnp.asarray(scale, loss.dtype), grads, left

    with x64(view.x64):
        now, state_now = view.read()
        params = list(view.params.flatten(now).values())
        buffers = list(view.buffers.flatten(state_now).values())
        total, losses = None, []
        for index, arrays in enumerate(data.spec.microbatches(flatten_batch(batch))):
            key = jnp.zeros(2, jnp.uint32) if keys is None else jnp.asarray(keys[index])
            loss, grads, buffers = step(params, buffers, [arrays[n] for n in data.names], key)
            losses.append(loss)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        names = [name for name, t in zip(view.params.names, learned, strict=True) if t]
        assert total is not None  # there is at least one microbatch
        return Reference(
            to_numpy(sum(losses[1:], losses[0])),
            {name: to_numpy(grad) for name, grad in zip(names, total, strict=True)},
            {n: to_numpy(b) for n, b in zip(view.buffers.names, buffers, strict=True)},
        )


def named_gradients(grads: Any) -> dict[str, Array]:
    """What `loss_and_grads` gave for a JAX model as NumPy arrays by name; without those that are None or float0."""
    leaves, _ = named_leaves(grads, "model")
    return {
        name: to_numpy(leaf)
        for name, leaf in leaves
        if is_array(leaf) and leaf.dtype != jax.dtypes.float0
    }


def _carriers(tree: Any, static: Any) -> list[Any]:
    """The array leaves; keys as their words."""
    leaves = [leaf for i, leaf in enumerate(jax.tree.leaves(tree)) if i not in static]
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x)
        for x in leaves
    ]
