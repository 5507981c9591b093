"""Capture of a JAX loss as one joint program: forward, loss and gradients, with boundary markers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.core_ir.arrays import to_numpy
from plait.core_ir.build import Builder
from plait.core_ir.errors import UsageError
from plait.core_ir.graph import Graph
from plait.core_ir.mesh import Mesh, part_type, whole_type
from plait.core_ir.types import KEY
from plait.frontends.captured import Captured, Leaf
from plait.frontends.jax.batch_tree import BatchTree, batch_tree, flatten_batch
from plait.frontends.jax.jaxpr import KEY_IMPL, is_key, type_of_aval, x64
from plait.frontends.jax.layouts import Use, used_layouts
from plait.frontends.jax.linen import boundaries_before, check_paths
from plait.frontends.jax.lower import lower_jaxpr
from plait.frontends.jax.marks import Marks
from plait.frontends.jax.mesh_axes import annotated_axes, check_axes
from plait.frontends.jax.model import ModelView, view_model
from plait.frontends.jax.placements import placed
from plait.frontends.jax.replicated import reduce_locally
from plait.frontends.jax.sharded import WHOLE, Operand, sharded
from plait.frontends.jax.trace import Traced, trace
from plait.frontends.jax.trees import ArrayTree, named_leaves


def capture(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    num_microbatches: int,
    mesh: Mesh | None = None,
    split: Sequence[str] | int | None,
    has_aux: bool = False,
    state: Any = None,
    trainable: Callable[[str, Any], bool] | None = None,
    device: Any = None,
) -> Captured:
    """The joint program of `loss_fn(model, batch) -> scalar` and its gradients, for one microbatch of `batch`.

    loss_fn: may declare a keyword `rng` and gets the microbatch's key. With `state` it is `loss_fn(model, batch, state)
        -> (loss, new_state)`; with `has_aux`, `(loss, aux)`; with both, `(loss, new_state, aux)`.
    model: a pytree of JAX or NumPy arrays (or of ShapeDtypeStructs), an nnx state, linen variables, an equinox module;
        or an nnx module: its Params are the parameters, its other variables buffers. Inexact leaves are differentiated.
    batch: 64-bit arrays of NumPy or torch are read as 32-bit ones, as JAX reads them by default; with its 64-bit types
        on, or a 64-bit leaf among the model's, they stay.
    mesh: whose axes, but for that of the stages, the model's `shard_map`s may be over. The program is then that of one
        rank. A parameter that is only ever used cut, in one way, is held so: such a leaf's type is that of the part.
    split: None (cuts where the loss calls `stage_boundary`) or paths of linen modules (a cut before each; the
        loss's own `stage_boundary` calls do not cut then).
    trainable: `trainable(name, leaf)` is False for parameters to freeze.
    device: not used: the program is the same for every device.

    Raises UsageError for arguments that do not fit, CaptureError where the loss cannot be captured.
    """
    paths = _paths(split)
    view = view_model(loss_fn, model, state, batch, has_aux=has_aux)
    leaves = _leaves(view, trainable)
    learned = tuple(leaf.trainable for leaf in leaves if leaf.role == "param")
    data = batch_tree(batch, num_microbatches, x64=view.x64)
    marks = Marks(cuts=lambda path: bool(path) == bool(paths))
    with x64(view.x64):
        with boundaries_before(paths) as called:
            traced = trace(loss_fn, view, data, learned)
        leaves = _laid_out(leaves, traced, mesh)
        graph = _lower(view, data, leaves, traced, marks, mesh)
    check_paths(paths, called, marks.paths)
    annotated = annotated_axes(graph, mesh)
    if mesh is not None:
        leaves, places = placed(leaves, view, mesh, graph, marks.left)
        annotated = {**places, **annotated}
    params = {leaf.name: leaf for leaf in leaves if leaf.role == "param"}
    buffers = [leaf.name for leaf in leaves if leaf.role == "buffer"]

    def read_leaves() -> dict[str, Any]:
        now, state_now = view.read()
        held = view.buffers.flatten(state_now).values()
        return {**view.params.flatten(now), **dict(zip(buffers, held, strict=True))}

    def pack_state(arrays: Mapping[str, Any]) -> Any:
        return _with_keys(view.buffers, [arrays[name] for name in buffers])

    def flatten_state(tree: Any) -> dict[str, Any]:
        try:
            arrays = view.buffers.flatten(view.select_state(tree)).values()
        except UsageError as refused:
            raise UsageError(f"Pipeline.state: {refused}") from refused
        return dict(zip(buffers, arrays, strict=True))

    return Captured(
        graph=graph,
        framework="jax",
        num_cuts=len(marks.paths),
        leaves=leaves,
        batch=data.spec,
        flatten_batch=flatten_batch,
        read_leaves=read_leaves,
        flatten_params=lambda tree: view.params.flatten(view.select(tree)),
        pack_grads=lambda grads: _pack_grads(view.params, params, grads),
        pack_aux=lambda aux: _with_keys(traced.aux, [aux[name] for name in traced.aux.names]),
        pack_state=pack_state,
        flatten_state=flatten_state,
        annotated=annotated,
    )


def _paths(split: Sequence[str] | int | None) -> tuple[str, ...]:
    if split is None:
        return ()
    if isinstance(split, (str, int)) or not all(isinstance(path, str) for path in split):
        raise UsageError(f"split must be None or a sequence of module paths, got {split!r}")
    doubled = sorted({path for path in split if list(split).count(path) > 1})
    if doubled:
        raise UsageError(f"split names {doubled} twice; a cut stands before a module once")
    return tuple(split)


def _leaves(view: ModelView, trainable: Callable[[str, Any], bool] | None) -> tuple[Leaf, ...]:
    """Parameters and buffers by name; state is prefixed with `state.` where a parameter has the same name."""
    arrays = dict(zip(view.params.names, _raw_leaves(view), strict=True))
    leaves = []
    for name, type in zip(view.params.names, view.params.types, strict=True):
        learned = type.dtype.is_inexact and (
            trainable is None or bool(trainable(name, arrays[name]))
        )
        leaves.append(Leaf(name, type, "param", learned))
    if not any(leaf.trainable for leaf in leaves):
        raise UsageError(
            "the model has no parameter to differentiate: "
            + (
                "trainable froze them all"
                if trainable and leaves
                else "no leaf is a floating-point array"
            )
        )
    prefix = "state." if set(view.params.names) & set(view.buffers.names) else ""
    for name, type in zip(view.buffers.names, view.buffers.types, strict=True):
        leaves.append(Leaf(prefix + name, type, "buffer", False))
    return tuple(leaves)


def _raw_leaves(view: ModelView) -> list[Any]:
    leaves, _ = named_leaves(view.read()[0], "model")
    return [leaf for i, (_, leaf) in enumerate(leaves) if i not in view.params.static]


def _laid_out(leaves: Sequence[Leaf], traced: Traced, mesh: Mesh | None) -> tuple[Leaf, ...]:
    """The leaves, parameters as they are held: cut, where every use of one is cut in one way."""
    if mesh is None:
        return tuple(leaves)
    results: list[Use] = [WHOLE] * len(traced.jaxpr.out_avals)
    num_grads = sum(leaf.trainable for leaf in leaves)
    results[1 : 1 + num_grads] = [None] * num_grads
    uses = used_layouts(traced.jaxpr, results, mesh.other_axes)
    return tuple(
        replace(leaf, layout=use, type=part_type(leaf.type, use, mesh.axes))
        if use and leaf.role == "param"
        else leaf
        for leaf, use in zip(leaves, uses, strict=False)
    )


def _lower(
    view: ModelView,
    data: BatchTree,
    leaves: Sequence[Leaf],
    traced: Traced,
    marks: Marks,
    mesh: Mesh | None,
) -> Graph:
    b = Builder("joint")
    axes = {} if mesh is None else {axis: mesh.axes[axis] for axis in mesh.other_axes}
    inputs: list[Operand] = []
    for leaf in leaves:
        type = whole_type(leaf.type, leaf.layout, axes)
        inputs.append(sharded(b.input(leaf.type, leaf.role, leaf.name), leaf.layout, type, axes))
    batch_types = (
        type_of_aval(aval, name) for aval, name in zip(data.avals, data.names, strict=True)
    )
    inputs += [b.input(t, "batch", n) for t, n in zip(batch_types, data.names, strict=True)]
    if traced.has_key:
        inputs.append(b.input(KEY, "rng_key"))
    loss_type = type_of_aval(traced.jaxpr.out_avals[0], "the loss")
    cotangent = b.input(loss_type, "loss_grad")
    marks.backward.add(cotangent)
    results = iter(
        lower_jaxpr(
            b,
            traced.jaxpr,
            [*inputs, cotangent],
            marks,
            axes,
            mesh.stage_axis if mesh else "",
            [WHOLE, *(leaf.layout for leaf in leaves if leaf.trainable)],
        )
    )
    b.output(next(results), "loss")
    for leaf in leaves:
        if leaf.trainable:
            gradient = next(results)
            if gradient in marks.backward:  # else the loss does not depend on it: zeros
                b.output(gradient, "param_grad", leaf.name)
    old = inputs[len(view.params.names) : len(leaves)]
    buffers = (leaf.name for leaf in leaves if leaf.role == "buffer")
    for name, before, after in zip(buffers, old, results, strict=False):
        if after is not before:
            b.output(after, "buffer_update", name)
    for name, value in zip(traced.aux.names, results, strict=True):
        b.output(value, "aux", name)
    layouts = {leaf.name: leaf.layout for leaf in leaves if leaf.role == "param"}
    graph = reduce_locally(b.build(), layouts)
    check_axes(graph, mesh)
    return graph


def _pack_grads(tree: ArrayTree, leaves: Mapping[str, Leaf], grads: Mapping[str, Any]) -> Any:
    """Gradients in the structure of the parameters: None where frozen or static, float0 for integers."""

    def gradient(leaf: Leaf, shape: tuple[int, ...]) -> Any:
        if leaf.trainable:
            return grads[leaf.name]
        return None if leaf.type.dtype.is_inexact else np.zeros(shape, jax.dtypes.float0)

    shapes = (aval.shape for aval in tree.avals)
    packed = iter([gradient(leaves[n], s) for n, s in zip(tree.names, shapes, strict=True)])
    total = len(tree.names) + len(tree.static)
    return jax.tree.unflatten(
        tree.treedef, [None if i in tree.static else next(packed) for i in range(total)]
    )


def _with_keys(tree: ArrayTree, carriers: Sequence[Any]) -> Any:
    """A tree of a step's results: keys as JAX's keys, other arrays as they come."""
    return tree.unflatten(
        [
            jax.random.wrap_key_data(jnp.asarray(to_numpy(x)), impl=KEY_IMPL)
            if is_key(aval.dtype)
            else x
            for x, aval in zip(carriers, tree.avals, strict=True)
        ]
    )
