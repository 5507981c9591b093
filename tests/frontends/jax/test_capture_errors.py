"""A user's mistakes in capture: one clear error each, with the place where there is one."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import lax
from jax_checks import random

from plait.core_ir.errors import BatchError, CaptureError, UsageError
from plait.frontends.jax.capture import capture

X = random((4, 3))
W = random((3,))
take = partial(capture, num_microbatches=1, split=None)


def refused(
    loss: Any,
    message: str,
    model: Any = W,
    batch: Any = X,
    error: Any = CaptureError,
    **options: Any,
) -> None:
    with pytest.raises(error, match=message):
        take(loss, model, batch, **options)


def test_a_loss_that_is_no_scalar() -> None:
    refused(lambda w, x: x @ w, r"must be a scalar, got shape \[4\]; reduce it")


def test_a_loss_that_is_an_integer() -> None:
    refused(lambda w, x: jnp.argmax(x @ w), "real floating-point number, got dtype int32")


def test_a_loss_that_is_a_tuple() -> None:
    refused(lambda w, x: (jnp.sum(w), 1), "returned a tuple.*has_aux=True")


@pytest.mark.parametrize("out", [jnp.sum, lambda w: (jnp.sum(w), 1, 2)])
def test_a_loss_without_the_aux_it_should_have(out: Any) -> None:
    refused(lambda w, x: out(w), r"must return \(loss, aux\)", has_aux=True)


def test_a_loss_without_the_state_it_should_have() -> None:
    refused(lambda w, x, s: jnp.sum(w), r"must return \(loss, new_state\)", state=np.float32(1))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (lambda s: {"a": s["a"]}, "the new state has the structure"),
        (lambda s: {**s, "b": s["b"][:1]}, r"'b' was float32\[2\] and became float32\[1\]"),
        (lambda s: {**s, "a": s["a"] + 0.5}, r"'a' was int32\[\] and became float32\[\]"),
    ],
)
def test_a_state_that_changes_its_type(new: Any, message: str) -> None:
    state = {"a": np.int32(1), "b": np.ones(2, "f4")}
    refused(lambda w, x, s: (jnp.sum(w), new(s)), message, state=state)


def test_nothing_to_differentiate() -> None:
    refused(lambda w, x: 1.0, "no leaf is a floating-point array", np.arange(3), error=UsageError)
    refused(
        lambda w, x: 1.0, "trainable froze them all", error=UsageError, trainable=lambda *_: False
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"w": W, "scale": 2.0}, r"leaf 'scale' is a builtins.float"),
        ({"w": W, "act": jnp.tanh}, r"leaf 'act' is a"),
        (object(), r"leaf 'model' is a builtins.object"),
        ({"w": torch.ones(3)}, r"leaf 'w' is a torch.Tensor"),
    ],
)
def test_a_model_with_a_leaf_that_is_no_array(model: Any, message: str) -> None:
    refused(lambda m, x: jnp.sum(x), message, model, error=UsageError)


def test_a_dtype_without_counterpart() -> None:
    refused(
        lambda w, x: jnp.sum(x), "dtype int4 has no counterpart", {"w": jnp.ones(3, "int4"), "x": W}
    )


def test_state_beside_an_nnx_module() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    refused(
        lambda m, x: jnp.sum(x), "nnx module holds its own state", model, error=UsageError, state=W
    )


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(BatchError, match=r"'x' has 4 rows.*num_microbatches=3"):
        capture(lambda w, b: jnp.sum(b["x"]), W, {"x": X}, num_microbatches=3, split=None)


def python_branch(w: Any, x: Any) -> Any:
    return w[0] if jnp.sum(x) > 0 else w[1]


def numpy_call(w: Any, x: Any) -> Any:
    return jnp.sum(w) * np.sum(np.asarray(x))


def selected_rows(w: Any, x: Any) -> Any:
    return jnp.sum(x[x > 0]) * w[0]


def counted_shape(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.nonzero(x)[0]) * w[0]


def python_index(w: Any, x: Any) -> Any:
    return w[0] * [1.0, 2.0][jnp.argmax(x)]


@pytest.mark.parametrize(
    "loss", [python_branch, numpy_call, selected_rows, counted_shape, python_index]
)
def test_what_depends_on_values_is_refused_at_the_users_line(loss: Any) -> None:
    line = loss.__code__.co_firstlineno + 1
    refused(loss, re.escape(f"{__file__}:{line}: a traced value decides"))


def divided(w: Any, x: Any) -> Any:
    return jnp.sum(x @ w) * (1 / len(x[4:]))


def missing_key(w: Any, x: Any) -> Any:
    return x["tokens"] if isinstance(x, dict) else {"x": x}["tokens"]


def wrong_shapes(w: Any, x: Any) -> Any:
    return jnp.sum(x @ jnp.stack([w, w]))


@pytest.mark.parametrize(
    ("loss", "raised"),
    [(divided, ZeroDivisionError), (missing_key, KeyError), (wrong_shapes, TypeError)],
)
def test_what_the_loss_raises_is_told_with_the_users_line(
    loss: Any, raised: type[Exception]
) -> None:
    line = loss.__code__.co_firstlineno + 1
    place = f"{__file__}:{line}: the loss raised {raised.__name__}"
    with pytest.raises(CaptureError, match=re.escape(place)) as caught:
        take(loss, W, X)
    assert isinstance(caught.value.__cause__, raised)


@pytest.mark.parametrize(
    "effect",
    [
        lambda x: jax.debug.print("{}", x),
        lambda x: jax.debug.callback(print, x),
        lambda x: jax.pure_callback(np.sin, x, x),
        lambda x: jax.experimental.io_callback(np.sin, x, x),
    ],
)
def test_callbacks_are_refused_at_the_users_line(effect: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        effect(x)
        return jnp.sum(x @ w)

    refused(loss, rf"{re.escape(__file__)}:\d+: .*callback to the host.*take it out of the loss")


def test_parameters_of_another_structure() -> None:
    captured = take(lambda p, x: jnp.sum(x @ p["w"]), {"w": W}, X)
    with pytest.raises(UsageError, match=r"missing \['w'\], unexpected \['v'\]"):
        captured.flatten_params({"v": W})
    with pytest.raises(UsageError, match=r"'w': compiled for f32\[3\], got f32\[2\]"):
        captured.flatten_params({"w": W[:2]})
    with pytest.raises(UsageError, match=r"'w': compiled for f32\[3\], got i32\[3\]"):
        captured.flatten_params({"w": np.arange(3, dtype="i4")})


def test_an_abstract_model_has_no_parameters_to_read() -> None:
    captured = take(lambda w, x: jnp.sum(x @ w), jax.ShapeDtypeStruct((3,), "f4"), X)
    with pytest.raises(UsageError, match="is abstract"):
        captured.read_leaves()


def test_a_primitive_without_a_rule_is_an_extern_with_the_users_line() -> None:
    captured = take(lambda w, x: jnp.sum(jnp.fft.rfft(x @ w).real), W, X)
    externs = [eqn for eqn in captured.graph.eqns if eqn.op.name == "extern"]
    assert {eqn.attrs["target"] for eqn in externs} == {"jax:fft"}
    assert {eqn.source.file for eqn in externs} == {__file__}


def test_a_placement_inside_the_loss_is_refused() -> None:
    refused(
        lambda w, x: jnp.sum(jax.device_put(x, jax.devices()[0]) @ w),
        "device_put, a placement on a device",
    )


def test_externs_are_one_where_their_parameters_are_plain() -> None:
    def loss(w: Any, x: Any) -> Any:
        transforms = jnp.fft.rfft(x @ w).real + jnp.fft.rfft(x @ (2 * w)).real
        folds = [
            lax.reduce_window(
                jnp.exp(x),
                1.0,
                lambda a, b: a * b + 1,
                window_dimensions=(4, 1),
                window_strides=(1, 1),
                padding="VALID",
            )
            for _ in range(2)
        ]
        return jnp.sum(transforms) + jnp.sum(w * (folds[0] + folds[1]))

    captured = take(loss, W, X)
    externs = [eqn.attrs for eqn in captured.graph.eqns if eqn.op.name == "extern"]
    specs = {
        name: {e["spec"] for e in externs if e["target"] == name}
        for name in ("jax:fft", "jax:reduce_window")
    }
    assert len([e for e in externs if e["target"] == "jax:fft"]) > len(specs["jax:fft"])
    assert len(specs["jax:reduce_window"]) == 2
