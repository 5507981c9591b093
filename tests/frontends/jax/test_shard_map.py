"""Losses that are mapped over a mesh: captured, run on every rank, whole and task by task, against JAX on devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_checks import random
from mesh_checks import capture_on, check, collectives, jax_mesh, rank_inputs, run

from plait.frontends.jax.boundary import stage_boundary

X = random((4, 6))
MLP = {
    "w1": random((6, 8), low=-1, high=1),
    "w2": random((8, 6), low=-1, high=1),
    "b1": random((8,)),
    "b2": random((6,)),
}
SPECS = {"w1": P(None, "model"), "w2": P("model"), "b1": P("model"), "b2": P()}
LAYOUTS = {"w1": ((), ("model",)), "w2": (("model",),), "b1": (("model",),)}
both_checks = pytest.mark.parametrize("vma", [True, False])


def mlp(p: Any, x: Any) -> Any:
    """A column-parallel and a row-parallel layer."""
    return lax.psum(jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"], "model") + p["b2"]


def stacked(number: int, tree: Any) -> Any:
    return jax.tree.map(lambda w: np.stack([w * (i + 1) / number for i in range(number)]), tree)


@both_checks
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
        for name, layout in LAYOUTS.items()
    }
    # One behind each layer, and one for the input's gradient of all layers but the first.
    assert collectives(captured) == [("all_reduce", "model")] * 3


@both_checks
def test_the_whole_loss_over_the_mesh(vma: bool) -> None:
    mesh = jax_mesh(model=2)

    def body(p: Any, x: Any) -> Any:
        y = stage_boundary(mlp(p["first"], x))
        return jnp.mean(mlp(p["second"], y) ** 2)

    specs = {"first": SPECS, "second": SPECS}
    loss = jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=vma)
    captured = check(loss, {"first": MLP, "second": MLP}, X, {"model": 2})
    assert captured.num_cuts == 1
    assert len(captured.layouts) == 6


@both_checks
def test_a_mesh_that_has_the_axis_of_the_stages_and_one_of_the_data(vma: bool) -> None:
    mesh = jax_mesh(stage=2, data=2, model=2)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jax.checkpoint(layer)(p, stage_boundary(layer(p, x))) ** 2)

    captured = check(loss, MLP, X, {"data": 2, "model": 2})
    assert captured.layouts == LAYOUTS
    assert captured.named_axes == {"model"}


@both_checks
def test_values_go_from_one_mapped_function_to_the_next_in_parts(vma: bool) -> None:
    mesh = jax_mesh(model=2)
    columns = jax.shard_map(
        lambda w, x: jnp.tanh(x @ w),
        mesh=mesh,
        in_specs=(P(None, "model"), P()),
        out_specs=P(None, "model"),
        check_vma=vma,
    )
    rows = jax.shard_map(
        lambda w, x: lax.psum(x @ w, "model"),
        mesh=mesh,
        in_specs=(P("model"), P(None, "model")),
        out_specs=P(),
        check_vma=vma,
    )

    def loss(p: Any, x: Any) -> Any:
        h = stage_boundary(2 * jnp.sin(columns(p["w1"], x)) + p["b1"])
        return jnp.mean(rows(p["w2"], h + columns(p["w1"], x)) ** 2)

    captured = check(loss, MLP, X, {"model": 2})
    assert captured.layouts == LAYOUTS
    assert collectives(captured) == [("all_reduce", "model")]


def test_what_is_summed_outside_is_summed_in_parts() -> None:
    mesh = jax_mesh(rows=2, columns=2)
    mapped = jax.shard_map(
        lambda w, x: jnp.tanh(x @ w),
        mesh=mesh,
        in_specs=(P(None, "columns"), P("rows")),
        out_specs=P("rows", "columns"),
    )

    def loss(w: Any, batch: Any) -> Any:
        y = mapped(w, batch["x"])
        return jnp.mean((y - batch["t"]) ** 2) + jnp.sum(jnp.sin(jnp.sum(y, 1)))

    batch = {"x": X, "t": random((4, 8))}
    captured = check(loss, MLP["w1"], batch, {"rows": 2, "columns": 2})
    assert captured.layouts == {"model": ((), ("columns",))}
    assert {op for op, _ in collectives(captured)} == {"all_reduce"}


def test_turned_and_decayed_parameters_are_held_cut() -> None:
    mesh = jax_mesh(model=2)
    specs = {**SPECS, "w1": P("model")}

    def turned(p: Any, x: Any) -> Any:
        return mlp({**p, "w1": p["w1"].T}, x)

    layer = jax.shard_map(turned, mesh=mesh, in_specs=(specs, P()), out_specs=P())

    def loss(p: Any, x: Any) -> Any:
        decay = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
        return jnp.mean(layer({**p, "w1": p["w1"].T}, x) ** 2) + 0.1 * decay

    captured = check(loss, MLP, X, {"model": 2})
    assert captured.layouts == LAYOUTS
    assert {op for op, _ in collectives(captured)} == {"all_reduce"}


def test_experts_that_exchange_tokens() -> None:
    mesh = jax_mesh(expert=4)
    weights = {"gate": random((6, 4)), "up": random((4, 6, 5)), "down": random((4, 5, 6))}

    def moe(p: Any, x: Any) -> Any:
        scores = jax.nn.softmax(x @ p["gate"])
        slots = scores.T[:, :, None] * x
        slots = lax.all_to_all(slots, "expert", 0, 1, tiled=True)
        slots = jnp.tanh(slots @ p["up"]) @ p["down"]
        return lax.all_to_all(slots, "expert", 1, 0, tiled=True).sum(0)

    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}

    def body(p: Any, x: Any, t: Any) -> Any:
        y = moe(p, x) + x
        return lax.pmean(jnp.mean((stage_boundary(y) - t) ** 2), "expert")

    def loss(p: Any, batch: Any) -> Any:
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(specs, P("expert"), P("expert")), out_specs=P()
        )
        return mapped(p, batch["x"], batch["t"])

    batch = {"x": random((8, 6)), "t": random((8, 6))}
    captured = check(loss, weights, batch, {"expert": 4})
    assert captured.layouts == {"up": (("expert",),), "down": (("expert",),)}
    assert collectives(captured).count(("all_to_all", "expert")) == 4


@both_checks
def test_a_ring(vma: bool) -> None:
    mesh, size = jax_mesh(ring=4), 4

    def body(w: Any, x: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            total, moving = carry
            moving = lax.ppermute(moving, "ring", [(i, (i + 1) % size) for i in range(size)])
            return total + jnp.tanh(moving @ w) * (1 + lax.axis_index("ring")), moving

        total, _ = lax.fori_loop(0, size, step, (jnp.zeros_like(x), x))
        return total

    def loss(w: Any, x: Any) -> Any:
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("ring")), out_specs=P("ring"), check_vma=vma
        )
        return jnp.mean(mapped(w, x) ** 2)

    check(loss, random((6, 6), low=-1, high=1), random((8, 6)), {"ring": 4})


@both_checks
def test_a_mapped_function_in_a_scan_over_layers(vma: bool) -> None:
    mesh = jax_mesh(model=2)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        def step(h: Any, layer_params: Any) -> tuple[Any, Any]:
            return h + jax.checkpoint(layer)(layer_params, h), jnp.sum(h)

        y, sums = lax.scan(step, x, p)
        return jnp.mean(y**2) + jnp.mean(sums)

    captured = check(loss, stacked(3, MLP), X, {"model": 2})
    assert captured.layouts == {name: ((), *layout) for name, layout in LAYOUTS.items()}
    assert collectives(captured) == []  # they all stand in the loops


@both_checks
def test_a_scan_over_layers_that_a_boundary_cuts(vma: bool) -> None:
    mesh = jax_mesh(model=2)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        y, _ = lax.scan(lambda h, w: (layer(w, stage_boundary(h)), None), x, p)
        return jnp.mean(y**2)

    captured = check(loss, stacked(2, MLP), X, {"model": 2})
    assert captured.num_cuts == 2
    assert captured.layouts == {name: ((), *layout) for name, layout in LAYOUTS.items()}
    assert {op for op, _ in collectives(captured)} == {"all_reduce"}


@both_checks
def test_nested_scans_inside_and_around(vma: bool) -> None:
    mesh = jax_mesh(model=2)

    def body(p: Any, x: Any) -> Any:
        def step(h: Any, layer: Any) -> tuple[Any, Any]:
            def inner(h: Any, scale: Any) -> tuple[Any, Any]:
                return h + mlp(layer, h * scale), None

            return lax.scan(inner, h, jnp.array([0.5, 0.25]))[0], None

        return lax.scan(step, x, p)[0]

    specs = jax.tree.map(lambda s: P(None, *s), SPECS, is_leaf=lambda s: isinstance(s, P))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        def micro(total: Any, row: Any) -> tuple[Any, Any]:
            return total + jnp.mean(mapped(p, row) ** 2), None

        return lax.scan(micro, jnp.float32(0), x.reshape(2, 2, 6))[0]

    captured = check(loss, stacked(2, MLP), X, {"model": 2})
    assert captured.layouts == {name: ((), *layout) for name, layout in LAYOUTS.items()}


@both_checks
def test_residuals_of_all_kinds(vma: bool) -> None:
    mesh = jax_mesh(rows=4)
    model = {"s": random(()), "w": random((6, 6)), "e": np.zeros((0, 6), "f4")}

    def body(p: Any, x: Any, n: Any) -> Any:
        place = lax.axis_index("rows")
        scale = jnp.sin(p["s"] * (place + 1))  # one for each rank
        is_large = jnp.sum(x) > 0
        count = n + place
        y = jnp.where(is_large, jnp.sin(x @ p["w"]), jnp.cos(x @ p["w"])) * scale
        y = y ** (1 + count % 2) + lax.dynamic_index_in_dim(p["w"], count % 6, keepdims=False)
        empty = jnp.tanh(jnp.concatenate([p["e"], x[:0]]) @ p["w"])
        return y * jnp.mean(x) + jnp.sum(empty)

    def loss(p: Any, batch: Any) -> Any:
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("rows"), P()), out_specs=P("rows"), check_vma=vma
        )
        y = stage_boundary(mapped(p, batch["x"], batch["n"]))
        return jnp.mean(y) * jnp.mean(y**2)

    check(loss, model, {"x": random((8, 6)), "n": np.int32(2)}, {"rows": 4})


@both_checks
def test_parameters_cut_along_any_dims(vma: bool) -> None:
    mesh, axes = jax_mesh(a=2, b=2, c=2), {"a": 2, "b": 2, "c": 2}
    specs = {
        "first": P("a"),
        "last": P(None, ("b",)),
        "both": P(("b", "a")),
        "spread": P("c", "a"),
        "whole": P(),
    }
    shapes = {"first": (4, 3), "last": (3, 4), "both": (8,), "spread": (2, 4), "whole": (3,)}
    model = {name: random(shape) for name, shape in shapes.items()}

    def body(p: Any, x: Any) -> Any:
        total = sum(jnp.sum(jnp.sin(w * (i + 1)) * jnp.sum(x)) for i, w in enumerate(p.values()))
        return lax.psum(total, ("a", "b", "c"))

    loss = jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=vma)
    captured = check(loss, model, X, axes)
    assert captured.layouts == {
        "first": (("a",),),
        "last": ((), ("b",)),
        "both": (("b", "a"),),
        "spread": (("c",), ("a",)),
    }


@both_checks
def test_a_parameter_cut_in_one_place_and_whole_in_another(vma: bool) -> None:
    mesh = jax_mesh(model=2)

    def look_up(table: Any, tokens: Any) -> Any:
        rows = tokens - lax.axis_index("model") * len(table)
        mine = (rows >= 0) & (rows < len(table))
        return lax.psum(jnp.where(mine[..., None], table[rows % len(table)], 0), "model")

    embed = jax.shard_map(
        look_up, mesh=mesh, in_specs=(P("model"), P()), out_specs=P(), check_vma=vma
    )

    def loss(p: Any, tokens: Any) -> Any:
        x = stage_boundary(jnp.tanh(embed(p["table"], tokens)))
        return -jax.nn.log_softmax(x @ p["table"].T)[..., 0].mean()

    tokens = np.random.default_rng(0).integers(0, 6, (4, 3)).astype("i4")
    captured = check(loss, {"table": random((6, 4))}, tokens, {"model": 2})
    assert captured.layouts == {}


@both_checks
def test_casts_before_the_mapped_function_leave_parameters_cut(vma: bool) -> None:
    mesh = jax_mesh(model=2)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return jnp.mean(layer(low, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    captured = check(loss, MLP, X, {"model": 2}, dtype="bf16")
    assert captured.layouts == LAYOUTS


@both_checks
@pytest.mark.parametrize("axes", [{"model": 2}, {"stage": 2, "model": 2}], ids=str)
def test_a_branch_with_a_mapped_function(axes: Any, vma: bool) -> None:
    mesh = jax_mesh(**axes)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P(), check_vma=vma)

    def loss(p: Any, x: Any) -> Any:
        y = lax.cond(x[0, 0] > 0, layer, lambda p, x: 2 * x, p, x)
        return jnp.mean(y**2)

    for x in (X, -X):
        captured = check(loss, MLP, x, {"model": 2})
    assert captured.layouts == LAYOUTS


@both_checks
def test_derivatives_of_the_users_own(vma: bool) -> None:
    mesh = jax_mesh(model=2)

    @jax.custom_vjp
    def copied(x: Any) -> Any:
        return x

    # With tracking, the cotangent of what does not vary is summed already.
    copied.defvjp(lambda x: (x, None), lambda _, g: (2 * (g if vma else lax.psum(g, "model")),))

    def body(w: Any, x: Any) -> Any:
        return jnp.tanh(copied(x) @ w)

    def loss(w: Any, x: Any) -> Any:
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(None, "model"), P()),
            out_specs=P(None, "model"),
            check_vma=vma,
        )
        return jnp.mean(mapped(w, jnp.sin(x @ w)) ** 2)

    check(loss, random((6, 6), low=-1, high=1), X, {"model": 2})


@both_checks
def test_dropout_aux_and_a_key_for_each_rank(vma: bool) -> None:
    mesh = jax_mesh(model=2)

    def body(w: Any, x: Any, key: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(key, lax.axis_index("model"))
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        y = jnp.where(kept, x * w * 2, 0)
        return lax.psum(jnp.mean(y**2), "model"), y

    def loss(w: Any, x: Any, *, rng: Any) -> tuple[Any, Any]:
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("model"), P(None, "model"), P()),
            out_specs=(P(), P(None, "model")),
            check_vma=vma,
        )
        total, y = mapped(w, x, rng)
        return total, {"y": y, "w": w}

    w, rng = random((6,)), jax.random.wrap_key_data(jnp.array([0, 7], jnp.uint32))
    (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(w, X, rng=rng)
    captured = check(loss, w, X, {"model": 2}, loss_and_grads=(value, grads), has_aux=True)
    for out in run(captured.graph, rank_inputs(captured, X, {"model": 2}), {"model": 2}):
        np.testing.assert_allclose(out["aux", "y"], aux["y"], rtol=1e-6)
        np.testing.assert_array_equal(out["aux", "w"], w)


@pytest.mark.parametrize(("vma", "spec"), [(True, P()), (False, P("rows"))])
def test_a_gradient_inside_the_mapped_function(vma: bool, spec: Any) -> None:
    """With tracking it is summed over the ranks already, without it is each rank's own."""
    mesh, x = jax_mesh(rows=4), np.arange(8, dtype="f4").reshape(4, 2)

    def body(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(x @ w))(w)[None]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("rows")), out_specs=spec, check_vma=vma
    )

    def loss(w: Any, x: Any) -> tuple[Any, Any]:
        return jnp.sum(x @ w), mapped(w, x)

    captured = capture_on(loss, np.array([1, 2], "f4"), x, {"rows": 4}, has_aux=True)
    for out in run(captured.graph, rank_inputs(captured, x, {"rows": 4}), {"rows": 4}):
        (grad,) = (array for (role, _), array in out.items() if role == "aux")
        np.testing.assert_array_equal(grad, [[12, 16]] if vma else x)


def test_the_gradient_of_a_replicated_parameter() -> None:
    x = np.arange(8, dtype="f4").reshape(4, 2)
    mesh = jax_mesh(rows=4)
    for vma in (True, False):
        loss = jax.shard_map(
            lambda w, x: lax.psum(jnp.sum(x @ w), "rows"),
            mesh=mesh,
            in_specs=(P(), P("rows")),
            out_specs=P(),
            check_vma=vma,
        )
        captured = check(loss, np.array([1, 2], "f4"), x, {"rows": 4})
        for out in run(captured.graph, rank_inputs(captured, x, {"rows": 4}), {"rows": 4}):
            np.testing.assert_array_equal(out["param_grad", "model"], [12, 16])


def test_one_axis_of_one_rank_needs_no_mesh() -> None:
    mesh = jax_mesh(model=1)
    layer = jax.shard_map(mlp, mesh=mesh, in_specs=(SPECS, P()), out_specs=P())
    captured = check(lambda p, x: jnp.mean(layer(p, x) ** 2), MLP, X, {"model": 1}, mesh=None)
    assert captured.layouts == {}
