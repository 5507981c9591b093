"""A user's model and state as trees of parameters and buffers, and how the loss is called with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from plait.core_ir.errors import CaptureError, UsageError
from plait.frontends.jax.trees import ArrayTree, array_tree, needs_x64

Outcome = tuple[Any, Any, Any]
"""`(loss, new buffers, aux)`; None for what there is not."""


@dataclass(frozen=True)
class ModelView:
    """The parameters and buffers of a model.

    call: `(params, buffers, batch, keywords) -> (loss, new buffers, aux)` on trees.
    read: the model's current `(params, buffers)`, as trees.
    select: the `params` argument of `loss_and_grads` -> a tree of the structure of `params`.
    select_state: what is set as `Pipeline.state` -> a tree of the structure of `buffers`.
    """

    params: ArrayTree
    buffers: ArrayTree
    call: Callable[[Any, Any, Any, Mapping[str, Any]], Outcome]
    read: Callable[[], tuple[Any, Any]]
    select: Callable[[Any], Any]
    select_state: Callable[[Any], Any]
    x64: bool


def view_model(
    loss_fn: Callable[..., Any], model: Any, state: Any, batch: Any, *, has_aux: bool
) -> ModelView:
    """The view of any model this frontend takes; UsageError for anything else."""
    if isinstance(model, nnx.Module):
        if state is not None:
            raise UsageError("state= is for functions; an nnx module holds its own state")
        return _view_nnx(loss_fn, model, batch, has_aux)
    return _view_tree(loss_fn, model, state, batch, has_aux)


def _view_tree(
    loss_fn: Callable[..., Any], model: Any, state: Any, batch: Any, has_aux: bool
) -> ModelView:
    x64 = needs_x64((model, state), batch)
    params = array_tree(model, "model", x64=x64, static=_holds_equinox(model))
    buffers = array_tree(state, "state", x64=x64, static=_holds_equinox(state))

    def call(params: Any, buffers: Any, batch: Any, keywords: Mapping[str, Any]) -> Outcome:
        if state is None:
            loss, aux = _pair(loss_fn(params, batch, **keywords), has_aux)
            return loss, None, aux
        out = loss_fn(params, batch, buffers, **keywords)
        wanted = 3 if has_aux else 2
        if not isinstance(out, tuple) or len(out) != wanted:
            names = "(loss, new_state, aux)" if has_aux else "(loss, new_state)"
            raise CaptureError(
                f"with state= the loss function must return {names}, got {_shown(out)}"
            )
        loss, new, *aux = out
        return loss, new, aux[0] if aux else None

    return ModelView(params, buffers, call, lambda: (model, state), _itself, _itself, x64)


def _view_nnx(
    loss_fn: Callable[..., Any], model: nnx.Module, batch: Any, has_aux: bool
) -> ModelView:
    """An nnx module: its Params are parameters, its other variables are buffers, chained by microbatch."""
    graphdef, *states = nnx.split(model, nnx.Param, ...)
    first_params, first_rest = states
    x64 = needs_x64(states, batch)
    params = array_tree(first_params, "model", x64=x64, static=False)
    buffers = array_tree(first_rest, "model", x64=x64, static=False)

    def call(params_state: Any, rest: Any, batch: Any, keywords: Mapping[str, Any]) -> Outcome:
        # A copy: or variables of this trace, random state above all, would be those of the user's module.
        merged = nnx.merge(graphdef, params_state, rest, copy=True)
        loss, aux = _pair(loss_fn(merged, batch, **keywords), has_aux)
        _, *after = nnx.split(merged, nnx.Param, ...)
        left = dict(nnx.to_flat_state(after[1]))
        # Variables made by the call itself (intermediates) are no state: they are dropped.
        kept = [(path, left[path]) for path, _ in nnx.to_flat_state(first_rest) if path in left]
        return loss, nnx.from_flat_state(kept), aux

    def read() -> tuple[Any, Any]:
        _, *now = nnx.split(model, nnx.Param, ...)
        return now[0], now[1]

    select, select_state = (partial(_part_of_nnx, number) for number in range(2))
    return ModelView(params, buffers, call, read, select, select_state, x64)


def _itself(tree: Any) -> Any:
    return tree


def _part_of_nnx(number: int, tree: Any) -> Any:
    """Of a module or its state the Params (0), or all else (1); another tree as it is."""
    if isinstance(tree, nnx.Module):
        return nnx.split(tree, nnx.Param, ...)[1 + number]
    if isinstance(tree, nnx.State):
        return nnx.split_state(tree, nnx.Param, ...)[number]
    return tree


def _pair(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, None
    if not isinstance(out, tuple) or len(out) != 2:
        raise CaptureError(
            f"with has_aux=True the loss function must return (loss, aux), got {_shown(out)}"
        )
    return out


def _shown(out: Any) -> str:
    return f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__


def _holds_equinox(tree: Any) -> bool:
    """Whether an equinox module stands in a tree: these hold settings and functions among their leaves."""
    return any(map(_is_equinox, jax.tree.leaves(tree, is_leaf=_is_equinox)))


def _is_equinox(node: Any) -> bool:
    return any(base.__module__.startswith("equinox.") for base in type(node).__mro__)
