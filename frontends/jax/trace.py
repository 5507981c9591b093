"""Tracing the loss and its gradients to one jaxpr, with errors that say where in the user's code."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.core_ir.arrays import is_array
from plait.core_ir.errors import CaptureError, PlaitError
from plait.core_ir.graph import Source
from plait.core_ir.types import KEY
from plait.frontends.jax.batch_tree import BatchTree
from plait.frontends.jax.jaxpr import KEY_IMPL, ClosedJaxpr, abstract, is_key, is_user_file
from plait.frontends.jax.model import ModelView
from plait.frontends.jax.trees import ArrayTree, array_tree
from plait.frontends.jax.uneven import does_not_divide

_DATA_DEPENDENT = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


_UNBOUND_AXIS = re.compile(r"unbound axis name: (\S+?)[.,]?(\s|$)")


@dataclass(frozen=True)
class Traced:
    """The jaxpr of one microbatch.

    Operands: parameters, buffers, batch leaves, the key (if `has_key`), the cotangent of the loss.
    Results: the loss, the gradient of each trainable parameter, the new buffers, the aux leaves.
    """

    jaxpr: ClosedJaxpr
    has_key: bool
    aux: ArrayTree


def trace(
    loss_fn: Callable[..., Any], view: ModelView, batch: BatchTree, trainable: tuple[bool, ...]
) -> Traced:
    """Trace the loss, for the parameters that are trainable, to one jaxpr."""
    has_key = _declares_rng(loss_fn)
    loss_dtype: list[Any] = []
    aux_trees: list[ArrayTree] = []

    def joint(
        params: list[Any],
        buffers: list[Any],
        batch_arrays: list[Any],
        keys: list[Any],
        cotangent: Any,
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        keywords = {"rng": jax.random.wrap_key_data(keys[0], impl=KEY_IMPL)} if keys else {}

        def forward(differentiated: list[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
            rest = iter(differentiated)
            all_params = [next(rest) if t else p for p, t in zip(params, trainable, strict=True)]
            loss, new_buffers, aux = view.call(
                view.params.trace(all_params),
                view.buffers.trace(buffers),
                batch.build(batch_arrays),
                keywords,
            )
            loss = _checked_loss(loss)
            loss_dtype[:] = [loss.dtype]
            aux_trees[:] = [array_tree(_as_arrays(aux), "aux", x64=view.x64, static=True)]
            return loss, (_checked_buffers(view.buffers, new_buffers, buffers), _array_leaves(aux))

        differentiated = [p for p, t in zip(params, trainable, strict=True) if t]
        loss, pullback, (new_buffers, aux) = jax.vjp(forward, differentiated, has_aux=True)
        (grads,) = pullback(cotangent.astype(loss.dtype))
        return loss, grads, new_buffers, aux

    keys = [abstract(KEY.shape, KEY.dtype.numpy)] if has_key else []
    operands = [_carriers(view.params), _carriers(view.buffers), list(batch.avals), keys]
    guess = np.dtype(np.float64 if view.x64 else np.float32)
    jaxpr = _make_jaxpr(joint, *operands, abstract((), guess))
    if loss_dtype[0] != guess:
        jaxpr = _make_jaxpr(joint, *operands, abstract((), loss_dtype[0]))
    return Traced(jaxpr, has_key, aux_trees[0])


def _carriers(tree: ArrayTree) -> list[jax.ShapeDtypeStruct]:
    return [
        abstract(type.shape, type.dtype.numpy, weak=bool(aval.weak_type))
        for type, aval in zip(tree.types, tree.avals, strict=True)
    ]


def _declares_rng(loss_fn: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(loss_fn).parameters.get("rng")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def _checked_loss(loss: Any) -> Any:
    if isinstance(loss, (int, float)) and not isinstance(loss, bool):
        loss = jnp.asarray(float(loss))
    if not is_array(loss):
        raise CaptureError(
            f"the loss function returned a {type(loss).__name__}, not a scalar array; return the loss alone, or "
            "(loss, aux) with has_aux=True"
        )
    if loss.shape != ():
        raise CaptureError(
            f"the loss must be a scalar, got shape {list(loss.shape)}; reduce it with jnp.mean or jnp.sum"
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise CaptureError(f"the loss must be a real floating-point number, got dtype {loss.dtype}")
    return jnp.asarray(loss)


def _as_arrays(aux: Any) -> Any:
    """Aux with its numbers as arrays."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, (int, float, complex)) else x, aux
    )


def _array_leaves(tree: Any) -> list[Any]:
    return [_carrier(x) for x in jax.tree.leaves(_as_arrays(tree)) if is_array(x)]


def _carrier(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x.dtype) else jnp.asarray(x)


def _checked_buffers(tree: ArrayTree, new: Any, old: list[Any]) -> list[Any]:
    """The new buffers in order; CaptureError where the structure or a type is not the old one's."""
    if not tree.names:
        return []
    if jax.tree.structure(new) != tree.treedef:
        raise CaptureError(
            f"the new state has the structure {jax.tree.structure(new)}, the old one {tree.treedef}; "
            "return all leaves, changed or not"
        )
    leaves = [x for i, x in enumerate(jax.tree.leaves(new)) if i not in tree.static]
    carriers = [_carrier(x) for x in leaves]
    for name, before, after in zip(tree.names, old, carriers, strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            raise CaptureError(
                f"state leaf {name!r} was {before.dtype}{list(before.shape)} and became "
                f"{after.dtype}{list(after.shape)}; a step must keep shapes and dtypes"
            )
    return carriers


def _make_jaxpr(function: Callable[..., Any], *operands: Any) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(function)(*operands)
    except _DATA_DEPENDENT as error:
        reason = str(error).split("\n", 1)[0]
        raise CaptureError(
            f"{_user_source(error)}: a traced value decides Python control flow, a Python number or a shape, which one "
            f"program for all batches cannot express: {reason} Use jnp.where, jax.lax.cond or a fixed size."
        ) from error
    except PlaitError:
        raise
    except NameError as error:
        unbound = _UNBOUND_AXIS.search(str(error))
        if unbound is None:
            raise _raised(error) from error
        raise CaptureError(
            f"{_user_source(error)}: a collective is over axis {unbound[1]!r} where no axis has that name; "
            "call it inside jax.shard_map over a mesh with that axis"
        ) from error
    except Exception as error:  # whatever the user's code raises
        raise _raised(error) from error


def _raised(error: Exception) -> CaptureError:
    uneven = does_not_divide(str(error))
    if uneven is not None:
        return CaptureError(f"{_user_source(error)}: {uneven}")
    advice = ""
    if "in_specs passed to shard_map" in str(error):
        advice = (
            " Capture traces arrays that lie nowhere, so axes of meshes must not be Explicit: give jax.make_mesh "
            "axis_types=(jax.sharding.AxisType.Auto, ...)."
        )
    return CaptureError(
        f"{_user_source(error)}: the loss raised {type(error).__name__} while it was traced: {error}{advice}"
    )


def _user_source(error: BaseException) -> Source:
    """The innermost frame of the user's in the traceback of an error."""
    found, traceback = Source(), error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_user_file(file):
            found = Source("", file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found
