"""What of a mapped loss is refused, with the user's line."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jax_checks import random
from mesh_checks import capture_on, jax_mesh

import plait
from plait.core_ir.errors import CaptureError, UsageError

X, W = random((4, 6)), random((6, 4))
LINE = r"test_shard_map_errors.py:\d+: "


def refused(loss: Callable[..., Any], message: str, axes: Any = None, **options: Any) -> None:
    with pytest.raises(CaptureError, match=message):
        capture_on(loss, W, X, {"model": 2} if axes is None else axes, **options)


WHOLE = P()
EXPLICIT = AxisType.Explicit


def over(mesh: Any, function: Callable[..., Any], w_spec: Any = WHOLE, **options: Any) -> Any:
    """The loss that is a function on parts."""

    def loss(w: Any, x: Any) -> Any:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=(w_spec, P()), out_specs=P(), **options
        )
        return jnp.sum(mapped(w, x))

    return loss


def summed(axis: str) -> Callable[..., Any]:
    return lambda w, x: lax.psum(lax.axis_index(axis) * jnp.sum(w) * x, axis)


def test_an_axis_that_the_mesh_lacks() -> None:
    mesh = jax_mesh(tensor=2)
    for spec in (P(None, "tensor"), P()):
        refused(
            over(mesh, summed("tensor"), spec),
            LINE + r"the model .* over axis 'tensor', which the mesh does not have; .* 'model'",
        )


def test_no_mesh_at_all() -> None:
    mesh = jax_mesh(model=2)
    refused(
        over(mesh, summed("model")),
        LINE + r"the model .* over axis 'model' of a mesh; pass .* mesh=\{..., 'model': 2\}",
        mesh=None,
    )


def test_another_size_than_that_of_the_mesh() -> None:
    refused(
        over(jax_mesh(model=4), summed("model")),
        LINE + "shard_map over a mesh with 4 ranks along axis 'model'; elsewhere there are 2",
    )


def test_the_axis_of_the_stages() -> None:
    mesh = AbstractMesh((2, 2), ("stage", "model"))
    for spec in (P(), P("stage")):
        refused(
            over(mesh, summed("stage"), spec), LINE + ".* 'stage', along which the stages stand"
        )


@pytest.mark.parametrize(
    ("of", "specs", "message"),
    [
        (
            lambda w, x: (w, x),
            (P("model"), P()),
            r"shard_map of on_rank cuts dim 0 of its argument a, of shape \[6, 4\], over axis 'model' of 4 ranks, and "
            r"4 does not divide 6; give the axis a size that divides 6, or pad the array; of the batch",
        ),
        (
            lambda w, x: ({"layers": [w.T, {"up": w.T}]}, [x]),
            (P(None, "model"), P()),
            r".*dim 1 of its argument a\.layers\.0, of shape \[4, 6\], .* 4 does not divide 6 "
            r"\(and 1 more like it\); give .* or pad the array$",
        ),
        (
            lambda w, x: (w, x),
            (P(), P(None, ("other", "model"))),
            r".* its argument b, of shape \[2, 6\], over axes 'other', 'model' of 8 ranks, and 8 .* give the axes",
        ),
    ],
    ids=["an array", "a tree", "axes"],
)
def test_a_spec_that_does_not_divide(of: Any, specs: Any, message: str) -> None:
    def on_rank(a: Any, b: Any) -> Any:
        return jnp.float32(0)

    def loss(w: Any, x: Any) -> Any:
        mesh = AbstractMesh((2, 4), ("other", "model"))
        return jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P())(*of(w, x))

    axes = {"other": 2, "model": 4}
    refused(loss, LINE + message, axes, num_microbatches=2)


def test_a_spec_of_a_function_without_a_name_does_not_divide() -> None:
    def function(scale: float, *arrays: Any) -> Any:
        return scale * jnp.sum(arrays[0])

    loss = over(jax_mesh(model=4), partial(function, 2.0), P("model"), check_vma=False)
    refused(loss, LINE + r"shard_map cuts dim 0 of its argument args\[0\], of shape", {"model": 4})


def test_a_collective_outside_shard_map() -> None:
    refused(
        lambda w, x: lax.psum(jnp.sum(x @ w), "model"),
        LINE + "a collective is over axis 'model' where no axis .* inside jax.shard_map",
    )
    refused(lambda w, x: jnp.sum(w) + no_such_name, "raised NameError while it was traced")  # type: ignore[name-defined]  # noqa: F821


def test_groups_within_an_axis() -> None:
    refused(
        over(
            jax_mesh(model=2),
            lambda w, x: lax.psum(x @ w, "model", axis_index_groups=[[0], [1]]),
            check_vma=False,
        ),
        LINE + "psum with axis_index_groups",
    )


def test_explicit_axes() -> None:
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2], axis_types=(EXPLICIT,))
    refused(over(mesh, summed("model"), P("model")), LINE + ".*must not be Explicit: give")


def test_data_axes_that_the_model_maps_over() -> None:
    options = {"num_microbatches": 2, "mesh": {"stage": 1, "model": 2}, "data_axes": ("model",)}
    loss = over(jax_mesh(model=2), summed("model"), P("model"))
    with pytest.raises(UsageError, match="data_axes names 'model', over which the model's own"):
        plait.compile(loss, W, X, **options)


def test_a_batch_that_the_model_cuts_and_that_is_too_small_to_be_cut_again() -> None:
    def loss(w: Any, x: Any) -> Any:
        mapped = jax.shard_map(
            lambda w, x: lax.psum(jnp.sum(x @ w), "model"),
            mesh=jax_mesh(model=2),
            in_specs=(P(), P("model")),
            out_specs=P(),
        )
        return mapped(w, x)

    pipeline = plait.compile(loss, W, X, num_microbatches=2, mesh={"stage": 1, "model": 2})
    found, _ = pipeline.loss_and_grads(X)
    np.testing.assert_allclose(found, np.sum(X @ W) / 2, rtol=1e-5)
