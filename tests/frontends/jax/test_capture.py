"""What a captured step hands over: ports, leaves, gradients in the user's structure, state, aux, keys, dtypes."""

from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax_checks import check_step, random, run

from plait.frontends.captured import Captured
from plait.frontends.jax.capture import capture
from plait.frontends.jax.trees import named_leaves

X = random((4, 3), low=-1, high=1)
PARAMS = {
    "layers": [
        {"w": random((3, 3), low=-1, high=1)},
        {"w": random((3, 2), low=-1, high=1), "b": random((2,), low=-1, high=1)},
    ],
    "scale": np.float32(2),
}


def loss(p: Any, x: Any) -> Any:
    for layer in p["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer.get("b", 0))
    return jnp.mean(x * p["scale"])


take = partial(capture, num_microbatches=1, split=None)


def ports(captured: Captured, outputs: bool = False) -> list[str]:
    found = captured.graph.output_ports if outputs else captured.graph.input_ports
    return [str(port) for port in found]


def gradients(captured: Captured, batch: Any = X) -> dict[str, Any]:
    """Gradients by name, zeros where the loss does not depend on the parameter."""
    out = run(captured, batch)
    trainable = [leaf for leaf in captured.leaves if leaf.trainable]
    return {
        leaf.name: out.get(
            ("param_grad", leaf.name), np.zeros(leaf.type.shape, leaf.type.dtype.numpy)
        )
        for leaf in trainable
    }


def test_ports_carry_the_users_names_in_the_models_order() -> None:
    captured = take(loss, PARAMS, X)
    assert ports(captured) == [
        "param 'layers.0.w'",
        "param 'layers.1.b'",
        "param 'layers.1.w'",
        "param 'scale'",
        "batch 'batch'",
        "loss_grad",
    ]
    assert ports(captured, outputs=True) == [
        "loss",
        "param_grad 'layers.0.w'",
        "param_grad 'layers.1.b'",
        "param_grad 'layers.1.w'",
        "param_grad 'scale'",
    ]


def test_gradients_come_back_in_the_structure_of_the_parameters() -> None:
    captured = check_step(loss, PARAMS, X, *jax.value_and_grad(loss)(PARAMS, X))
    packed = captured.pack_grads(gradients(captured))
    assert jax.tree.structure(packed) == jax.tree.structure(jax.grad(loss)(PARAMS, X))


def test_the_cotangent_of_the_loss_is_an_input() -> None:
    captured = take(loss, PARAMS, X)
    once, quarter = run(captured, X), run(captured, X, cotangent=0.25)
    np.testing.assert_allclose(
        quarter["param_grad", "scale"] * 4, once["param_grad", "scale"], rtol=1e-6
    )
    assert quarter["loss", ""] == once["loss", ""]


def test_frozen_integer_and_unused_leaves() -> None:
    params = {
        "w": random((3,)),
        "frozen": random((3,)),
        "ids": np.arange(3, dtype="i4"),
        "unused": random((2,)),
    }

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(x @ (p["w"] * p["frozen"])[p["ids"]])

    captured = take(loss, params, X, trainable=lambda name, leaf: name != "frozen")
    assert {leaf.name: leaf.trainable for leaf in captured.leaves} == {
        "frozen": False,
        "ids": False,
        "unused": True,
        "w": True,
    }
    assert ports(captured, outputs=True) == ["loss", "param_grad 'w'"]
    packed = captured.pack_grads(gradients(captured))
    assert packed["frozen"] is None
    assert packed["ids"].dtype == jax.dtypes.float0
    assert packed["ids"].shape == (3,)
    np.testing.assert_array_equal(packed["unused"], np.zeros(2))
    reference = jax.grad(loss, allow_int=True)(params, X)
    np.testing.assert_allclose(packed["w"], reference["w"], rtol=1e-5)


def test_trainable_sees_the_leaf() -> None:
    captured = take(loss, PARAMS, X, trainable=lambda name, leaf: leaf.ndim == 2)
    assert [leaf.name for leaf in captured.leaves if leaf.trainable] == ["layers.0.w", "layers.1.w"]


def test_a_model_that_is_one_array() -> None:
    captured = take(lambda w, x: jnp.sum(x @ w), random((3,)), X)
    assert ports(captured)[:2] == ["param 'model'", "batch 'batch'"]
    np.testing.assert_allclose(captured.pack_grads(gradients(captured)), X.sum(0), rtol=1e-5)


def test_an_abstract_model_captures_to_the_same_graph() -> None:
    shapes = jax.eval_shape(lambda: PARAMS)
    assert take(loss, shapes, X).graph.input_types == take(loss, PARAMS, X).graph.input_types


def test_parameters_are_read_anew_and_checked() -> None:
    captured = take(loss, PARAMS, X)
    assert captured.read_leaves()["layers.0.w"] is PARAMS["layers"][0]["w"]
    other = jax.tree.map(lambda x: np.asarray(x) + 1, PARAMS)
    assert captured.flatten_params(other)["scale"] == 3


def test_the_first_microbatch_is_captured_and_static_leaves_are_part_of_the_program() -> None:
    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"] if batch["mode"] == "plain" else -batch["x"]
        return jnp.sum(x @ p) * batch["n"] + (0 if batch["none"] is None else 1)

    batch = {"x": X, "mode": "plain", "n": 3, "none": None}
    captured = capture(loss, random((3,)), batch, num_microbatches=2, split=None)
    assert [str(v.type) for _, v in captured.graph.inputs_of("batch")] == ["i32[]", "f32[2, 3]"]
    expected = loss(captured.read_leaves()["model"], {**batch, "x": X[:2]})
    np.testing.assert_allclose(run(captured, batch)["loss", ""], expected, rtol=1e-6)


def test_python_numbers_of_the_batch_do_not_widen() -> None:
    p = random((3,), jnp.bfloat16)
    batch = {"x": X.astype(jnp.bfloat16), "n": 0.5}
    captured = take(lambda p, b: jnp.sum(b["x"] @ p * b["n"]), p, batch)
    assert str(captured.graph.outputs[0].type) == "bf16[]"


def test_a_loss_of_another_dtype_has_a_cotangent_of_that_dtype() -> None:
    captured = take(lambda p, x: jnp.sum(x @ p).astype("f2"), random((3,)), X)
    assert [str(v.type) for _, v in captured.graph.inputs_of("loss_grad")] == ["f16[]"]


def test_models_of_f64_are_captured_in_f64_without_the_global_flag() -> None:
    params = jax.tree.map(lambda x: np.asarray(x, "f8"), PARAMS)
    with jax.enable_x64(True):
        expected = jax.value_and_grad(loss)(params, X.astype("f8"))
    captured = check_step(loss, params, X.astype("f8"), *expected, dtype="f64")
    assert not jax.config.jax_enable_x64
    assert {str(v.type.dtype) for v in captured.graph.inputs} == {"f64"}


def test_64_bit_batches_of_a_32_bit_model_are_narrowed_as_jax_does() -> None:
    batch = {"x": X.astype("f8"), "ids": np.arange(4)}
    captured = take(lambda p, b: jnp.mean(b["x"] @ p * b["ids"]), random((3,)), batch)
    assert [str(v.type) for _, v in captured.graph.inputs_of("batch")] == ["i32[4]", "f32[4, 3]"]


def test_a_loss_that_declares_rng_gets_the_key_of_the_microbatch() -> None:
    def loss(p: Any, x: Any, rng: Any) -> Any:
        return jnp.mean(jax.random.normal(rng, x.shape) * (x @ p)[:, None])

    p = random((3,))
    captured = take(loss, p, X)
    key = jax.random.fold_in(jax.random.key(3), 5)
    words = np.asarray(jax.random.key_data(key))
    np.testing.assert_allclose(run(captured, X, key=words)["loss", ""], loss(p, X, key), rtol=1e-5)
    assert "rng_key" in ports(captured)
    assert "rng_key" not in ports(take(lambda p, x: jnp.sum(x @ p), p, X))


def test_state_is_read_and_updated() -> None:
    state = {"mean": np.zeros(3, "f4"), "count": np.int32(0), "kept": np.ones(2, "f4")}

    def loss(p: Any, x: Any, state: Any) -> Any:
        mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
        return jnp.mean((x - mean) @ p), {**state, "mean": mean, "count": state["count"] + 1}

    p = random((3,))
    captured = take(loss, p, X, state=state)
    out = run(captured, X)
    _, new = loss(p, X, state)
    assert ports(captured, outputs=True) == [
        "loss",
        "param_grad 'model'",
        "buffer_update 'count'",
        "buffer_update 'mean'",
    ]
    np.testing.assert_allclose(out["buffer_update", "mean"], new["mean"], rtol=1e-6)
    assert out["buffer_update", "count"] == 1
    assert [(leaf.name, leaf.role) for leaf in captured.leaves][1:] == [
        ("count", "buffer"),
        ("kept", "buffer"),
        ("mean", "buffer"),
    ]
    packed = captured.pack_state({**captured.read_leaves(), "count": np.int32(5)})
    assert packed["count"] == 5
    assert set(packed) == set(state)


def test_state_with_the_names_of_parameters() -> None:
    captured = take(
        lambda p, x, s: (jnp.mean(x @ p["w"] * s["w"]), s),
        {"w": X[0]},
        X,
        state={"w": np.float32(2)},
    )
    assert [leaf.name for leaf in captured.leaves] == ["w", "state.w"]
    assert captured.pack_state(captured.read_leaves()) == {"w": 2}


def test_aux_keeps_its_structure() -> None:
    def loss(p: Any, x: Any) -> Any:
        y = x @ p
        return jnp.mean(y), {"rows": y, "stats": (y.max(), 3, "text", None)}

    p = random((3,))
    captured = take(loss, p, X, has_aux=True)
    out = run(captured, X)
    aux = captured.pack_aux({name: value for (role, name), value in out.items() if role == "aux"})
    np.testing.assert_allclose(aux["rows"], X @ p, rtol=1e-5)
    assert aux["stats"][1:] == (3, "text", None)


def test_state_and_aux_together() -> None:
    captured = take(
        lambda p, x, s: (jnp.mean(x @ p), s + 1, s * 2),
        random((3,)),
        X,
        state=np.float32(4),
        has_aux=True,
    )
    out = run(captured, X)
    assert (out["buffer_update", "state"], out["aux", "aux"]) == (5, 8)


class Gate(eqx.Module):
    w: jax.Array
    rate: float
    act: Any = jnp.tanh


def test_equinox_modules_keep_their_static_leaves() -> None:
    model = Gate(jnp.asarray(random((3,))), 0.5)

    def loss(m: Any, x: Any) -> Any:
        return jnp.mean(jnp.square(m.act(x @ m.w) * m.rate))

    captured = check_step(loss, model, X, *eqx.filter_value_and_grad(loss)(model, X))
    assert [leaf.name for leaf in captured.leaves] == ["w"]
    packed = captured.pack_grads(gradients(captured))
    assert isinstance(packed, Gate)
    assert (packed.rate, packed.act) == (None, None)


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 5, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(5, 5, rngs=rngs)
        self.tied = self.last

    def __call__(self, x: Any) -> Any:
        return self.tied(self.last(self.drop(self.norm(self.first(x)))))


def mean_square(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def test_an_nnx_module_has_params_and_buffers_that_its_call_changes() -> None:
    model = Noisy(nnx.Rngs(0))
    after = nnx.clone(model)
    loss, grads = nnx.value_and_grad(mean_square)(after, X)
    captured = check_step(mean_square, model, X, loss, grads)
    assert [leaf.name for leaf in captured.leaves if leaf.role == "param"] == [
        "first.kernel",
        "last.bias",
        "last.kernel",
        "norm.bias",
        "norm.scale",
    ]
    updates = {
        name: value for (role, name), value in run(captured, X).items() if role == "buffer_update"
    }
    assert set(updates) == {"norm.mean", "norm.var", "drop.rngs.count"}
    np.testing.assert_allclose(updates["norm.mean"], after.norm.mean[...], rtol=1e-5, atol=1e-6)
    assert updates["drop.rngs.count"] == model.drop.rngs.count[...] + 1
    packed = captured.pack_grads(gradients(captured))
    assert isinstance(packed, nnx.State)
    assert jax.tree.structure(packed) == jax.tree.structure(grads)
    state = captured.pack_state(captured.read_leaves())
    assert jnp.issubdtype(state["drop"]["rngs"]["key"][...].dtype, jax.dtypes.prng_key)


def test_parameters_of_an_nnx_module_are_taken_as_module_or_state() -> None:
    model = Noisy(nnx.Rngs(0))
    captured = take(mean_square, model, X)
    names = {leaf.name for leaf in captured.leaves if leaf.role == "param"}
    for params in (model, nnx.state(model), nnx.state(model, nnx.Param)):
        assert set(captured.flatten_params(params)) == names


def test_an_nnx_state_is_a_model() -> None:
    graphdef, state = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))

    def loss(state: Any, x: Any) -> Any:
        return mean_square(nnx.merge(graphdef, state), x)

    captured = check_step(loss, state, X, *jax.value_and_grad(loss)(state, X))
    assert dict(named_leaves(state, "model")[0]).keys() == {"bias", "kernel"}
    assert [leaf.name for leaf in captured.leaves] == ["bias", "kernel"]


def test_equations_know_the_users_line() -> None:
    captured = take(loss, PARAMS, X)
    tanh = next(eqn for eqn in captured.graph.eqns if eqn.op.name == "tanh")
    assert tanh.source.file == __file__
    assert "jnp.tanh" in Path(__file__).read_text().splitlines()[tanh.source.line - 1]
