"""`stage_boundary`: the identity everywhere, and in a captured step a pair of markers at each place it was called."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_checks import check_step, marks, random, run

from plait.frontends.jax.boundary import stage_boundary
from plait.frontends.jax.capture import capture

X = random((4, 6))
PARAMS = {"in": random((6, 6), low=-0.3, high=0.3), "w": random((3, 6, 6), low=-0.5, high=0.5)}


def pair(index: int, forward: int = 1, backward: int = 1) -> set[tuple[int, str, int]]:
    return {(index, "forward", forward), (index, "backward", backward)}


def check(
    loss: Any, batch: Any = X, params: Any = None, **options: Any
) -> list[tuple[int, str, int]]:
    """The marks of a loss whose captured step agrees with JAX."""
    params = PARAMS if params is None else params
    expected = jax.value_and_grad(loss)(params, batch)
    return marks(check_step(loss, params, batch, *expected, **options))


TRANSFORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "second-derivative": lambda f: jax.grad(
        lambda x: (jax.grad(lambda x: (f(x) ** 3).sum())(x) ** 2).sum()
    ),
    "vmap": jax.vmap,
    "vmap-of-grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
    "remat": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum()),
    "scan": lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), 0, x)[1],
    "jacfwd": lambda f: jax.jacfwd(f),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, f, x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_is_the_identity_under(name: str) -> None:
    with_mark = TRANSFORMS[name](
        lambda x: jnp.sin(stage_boundary({"a": jnp.cos(x), "b": "text"})["a"])
    )
    without = TRANSFORMS[name](lambda x: jnp.sin(jnp.cos(x)))
    np.testing.assert_array_equal(with_mark(X), without(X))


def test_outside_a_trace_it_gives_the_leaves_themselves() -> None:
    tree = {"x": X, "y": [None, "text", 3, jax.random.key(0)]}
    marked = stage_boundary(tree)
    assert jax.tree.structure(marked) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(marked), jax.tree.leaves(tree), strict=True))


@pytest.mark.parametrize(
    ("crossing", "num_operands"), [(np.ones(3, "f4"), 1), (None, 0), ("text", 0)]
)
def test_a_cut_that_nothing_traced_crosses_is_a_cut(crossing: Any, num_operands: int) -> None:
    def loss(p: Any, x: Any) -> Any:
        h = jnp.sin(x @ p["in"])
        stage_boundary(crossing)
        return jnp.mean(jnp.sin(h) ** 2)

    assert check(loss) == [(0, "forward", num_operands)]


def test_each_call_cuts_in_order_of_execution() -> None:
    def loss(p: Any, x: Any) -> Any:
        h = stage_boundary(jnp.tanh(x @ p["in"]))
        h = stage_boundary(jnp.tanh(h @ p["w"][0]))
        return jnp.mean((h @ p["w"][1]) ** 2)

    assert check(loss) == [
        (0, "forward", 1),
        (1, "forward", 1),
        (1, "backward", 1),
        (0, "backward", 1),
    ]


def test_only_what_has_a_gradient_is_marked_backward() -> None:
    def loss(p: Any, batch: Any) -> Any:
        table, ids = jnp.cos(batch["x"]), batch["ids"]
        h = batch["x"] @ p["in"]
        table, ids, h, _dead = stage_boundary((table, ids, h, 2 * h))
        return jnp.mean((table * h * ids[:, None]) ** 2)

    batch = {"x": X, "ids": np.arange(4, dtype="i4")}
    assert check(loss, batch) == [(0, "forward", 4), (0, "backward", 1)]


def test_a_cut_behind_frozen_parameters_has_no_backward_marker() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(stage_boundary(x @ p["in"]) @ p["w"][0])

    captured = capture(
        loss, PARAMS, X, num_microbatches=1, split=None, trainable=lambda name, _: name == "w"
    )
    assert marks(captured) == [(0, "forward", 1)]
    assert [port.name for port in captured.graph.output_ports if port.role == "param_grad"] == ["w"]


def test_a_compiled_function_called_three_times_cuts_three_times() -> None:
    layer = jax.jit(lambda x, w: jnp.sin(stage_boundary(x) @ w))

    def loss(p: Any, x: Any) -> Any:
        h = x @ p["in"]
        for i in range(3):
            h = layer(h, p["w"][i])
        return jnp.mean(h)

    layer(X, PARAMS["in"])  # compiled, and its trace kept, before the capture
    found = check(loss)
    assert [index for index, _, _ in found] == [0, 1, 2, 2, 1, 0]
    assert set(found) == pair(0) | pair(1) | pair(2)


def test_a_scan_is_unrolled_where_a_boundary_cuts_it() -> None:
    def loss(p: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            h = jnp.tanh(stage_boundary(h) @ w)
            return h, h.sum()

        h, sums = lax.scan(layer, x @ p["in"], p["w"])
        return jnp.mean(h) + jnp.sum(sums**2)

    expected = jax.value_and_grad(loss)(PARAMS, X)
    captured = check_step(loss, PARAMS, X, *expected)
    assert [index for index, _, _ in marks(captured)] == [0, 1, 2, 2, 1, 0]
    assert "scan" not in {eqn.op.name for eqn in captured.graph.eqns}


def test_a_reversed_scan_is_unrolled_from_its_end() -> None:
    def loss(p: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            h = jnp.tanh(stage_boundary(h) @ w)
            return h, h

        return jnp.mean(lax.scan(layer, x @ p["in"], p["w"], reverse=True)[1] ** 2)

    assert len(check(loss)) == 6


def test_a_scan_without_a_boundary_is_kept() -> None:
    def loss(p: Any, x: Any) -> Any:
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), stage_boundary(x @ p["in"]), p["w"])
        return jnp.mean(h)

    captured = check_step(loss, PARAMS, X, *jax.value_and_grad(loss)(PARAMS, X))
    assert [eqn.op.name for eqn in captured.graph.eqns].count("scan") == 2


def test_recomputation_starts_from_what_crossed_the_cut() -> None:
    def loss(p: Any, x: Any) -> Any:
        block = jax.checkpoint(
            lambda h: jnp.sin(stage_boundary(jnp.sin(h @ p["w"][0])) @ p["w"][1])
        )
        return jnp.mean(block(x @ p["in"]) ** 2)

    captured = check_step(loss, PARAMS, X, *jax.value_and_grad(loss)(PARAMS, X))
    assert marks(captured) == [(0, "forward", 1), (0, "backward", 1)]
    # Two sines in the forward; the one behind the cut is not needed again, nor is the one before it.
    assert [eqn.op.name for eqn in captured.graph.eqns].count("sin") <= 3


def test_recomputation_reads_the_forward_through_barriers() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))(x, p["in"]))

    captured = check_step(loss, PARAMS, X, *jax.value_and_grad(loss)(PARAMS, X))
    names = [eqn.op.name for eqn in captured.graph.eqns]
    assert names.count("barrier") == 2
    assert names.count("sin") == 3
    assert names.index("barrier") < len(names) - 1 - names[::-1].index("sin")


def penalty(p: Any, x: Any) -> Any:
    """A loss with a gradient in it, through a boundary."""
    return jnp.mean(jax.grad(lambda x: jnp.sum(stage_boundary(jnp.sin(x @ p["in"])) ** 2))(x) ** 2)


def adversarial(p: Any, x: Any) -> Any:
    """A loss at a point that a gradient of its own gave."""

    def inner(x: Any) -> Any:
        return jnp.mean(stage_boundary(jnp.sin(x @ p["in"])) ** 2)

    return inner(lax.stop_gradient(x + jax.grad(inner)(x)))


@pytest.mark.parametrize(("loss", "expected"), [(penalty, [0, 0]), (adversarial, [0, 1, 1])])
def test_in_a_gradient_that_the_loss_takes_only_the_forward_cuts(
    loss: Any, expected: list[int]
) -> None:
    assert [index for index, _, _ in check(loss)] == expected


def test_keys_and_integers_cross() -> None:
    def loss(p: Any, x: Any, *, rng: Any) -> Any:
        h, n, key = stage_boundary((x @ p["in"], jnp.arange(4), jax.random.split(rng)[0]))
        return jnp.mean(h * n[:, None] * jax.random.uniform(key, h.shape))

    captured = capture(loss, PARAMS, X, num_microbatches=1, split=None)
    expected = loss(PARAMS, X, rng=jax.random.wrap_key_data(jnp.array([0, 7], jnp.uint32)))
    np.testing.assert_allclose(run(captured, X)["loss", ""], expected, rtol=1e-6)
    assert marks(captured) == [(0, "forward", 3), (0, "backward", 1)]
