"""Calls, control flow and recomputation against JAX; which of them stay in the graph."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax.eval_jaxpr import eval_jaxpr_p
from jax.custom_derivatives import linear_call
from jax_checks import Case, check, lower, random, with_gradients

from plait.core_ir.errors import CaptureError
from plait.frontends.jax import lower_control, lower_flow
from plait.frontends.jax.boundary import stage_boundary
from plait.frontends.jax.marks import BOUNDARY, COTANGENT, TANGENT

X, W = random((4, 3)), random((3, 3))
KEY = jax.random.key(0)
OVER_MESH = jax.shard_map(
    jnp.sin,
    mesh=jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,)),
    in_specs=jax.sharding.PartitionSpec(),
    out_specs=jax.sharding.PartitionSpec(),
)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_jvp
def cubed(x: Any) -> Any:
    return x**3


cubed.defjvp(lambda p, t: (cubed(*p), 3 * p[0] ** 2 * t[0]))


@jax.custom_batching.custom_vmap
def halved(x: Any) -> Any:
    return x / 2


halved.def_vmap(lambda size, batched, x: (x / 2, batched[0]))


@jax.custom_vjp
def sine(x: Any) -> Any:
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),), optimize_remat=True)


def scaled(x: Any) -> Any:
    return linear_call(lambda r, x: x * r[0], lambda r, g: g * r[0], [X], x)


def rnn(w: Any, xs: Any, reverse: bool = False) -> Any:
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h @ w + x)
        return h, (h * 2, h.sum())

    return lax.scan(step, jnp.zeros(3, xs.dtype), xs, reverse=reverse)


def branch(i: Any, x: Any) -> Any:
    return lax.switch(i, (lambda x: x * 2, lambda x: x + 1, jnp.sin), x)


def choose(p: Any, x: Any) -> Any:
    return lax.cond(p, lambda x: x * W[0, 0], lambda x: x @ W, x)


def newton(x: Any) -> Any:
    return lax.while_loop(
        lambda s: jnp.any(s[0] ** 2 - x > 1e-3), lambda s: ((s[0] + x / s[0]) / 2, s[1] + 1), (x, 0)
    )


def total(f: Any) -> Any:
    return lambda *args: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(f(*args)))


CASES = [
    Case("jit", "nested", jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1), (X,)),
    Case("jit", "constants", jax.jit(lambda x: x @ W + jnp.arange(3.0)), (X,)),
    Case(
        "closed_call",
        "bound",
        lambda x: eval_jaxpr_p.bind(x, jaxpr=jax.make_jaxpr(jnp.sin)(X)),
        (X,),
    ),
    Case("custom_jvp_call", "plain", cubed, (X,)),
    Case("", "custom-jvp-gradient", with_gradients(cubed), (X, X)),
    Case("custom_vjp_call", "plain", doubled, (X,)),
    Case("", "custom-vjp-gradient", with_gradients(doubled), (X, X)),
    Case("custom_vmap_call", "plain", halved, (X,)),
    Case("linear_call", "plain", scaled, (X + 1,)),
    Case("linear_call", "gradient", with_gradients(scaled), (X, X + 1)),
    Case("composite", "plain", lax.composite(lambda x: x * 2, "test.doubled"), (X,)),
    Case("remat_opt", "plain", jax.jit(lambda x: jax.vjp(sine, x)[0]), (X,)),
    Case("", "remat-opt-gradient", with_gradients(jax.checkpoint(sine)), (X, X)),
    Case("remat2", "plain", jax.checkpoint(jnp.sin), (X,)),
    Case(
        "remat2",
        "gradient",
        jax.grad(total(jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w)), (0, 1)),
        (X, W),
    ),
    Case(
        "remat2",
        "policy",
        jax.grad(
            total(
                jax.checkpoint(
                    lambda x, w: jnp.sin(x @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
                )
            ),
            1,
        ),
        (X, W),
    ),
    Case("cond", "switch", branch, (np.int32(1), X)),
    Case("cond", "clamped", branch, (np.int32(-7), X)),
    Case("cond", "false", choose, (np.bool_(False), X)),
    Case("cond", "true-gradient", jax.grad(total(choose), 1), (np.bool_(True), X)),
    Case("platform_index", "diagonal", jnp.diagonal, (W,)),
    Case("platform_index", "gradient", jax.grad(lambda x: jnp.sum(jnp.diagonal(x) ** 2)), (W,)),
    Case("while", "newton", newton, (np.array([2.0, 9.0], "f4"),)),
    Case(
        "while",
        "fori",
        lambda x, n: lax.fori_loop(0, n, lambda i, x: x * 1.5 + i, x),
        (X, np.int32(4)),
    ),
    Case(
        "while",
        "no-trip",
        lambda x, n: lax.fori_loop(0, n, lambda i, x: x * 2, x),
        (X, np.int32(0)),
    ),
    Case("while", "vmap", jax.vmap(newton), (X**2 + 1,)),
    Case(
        "while",
        "vmap-constants",
        jax.vmap(
            lambda n, y: lax.while_loop(
                lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * y + W, s[2]), (0, W, KEY)
            )
        ),
        (np.array([3, 0, 5, 1]), X[:, 0]),
    ),
    Case("scan", "forward", rnn, (W, X)),
    Case("scan", "reverse", lambda w, x: rnn(w, x, True), (W, X)),
    Case("scan", "empty", rnn, (W, X[:0])),
    Case("scan", "gradient", jax.grad(total(rnn), (0, 1)), (W, X)),
    Case("scan", "reverse-gradient", jax.grad(total(lambda w, x: rnn(w, x, True)), (0, 1)), (W, X)),
    Case("scan", "fori", lambda x: lax.fori_loop(0, 4, lambda i, x: x * 1.5 + i, x), (X,)),
    Case("scan", "associative", lambda x: lax.map(jnp.sin, x), (X,)),
    Case("optimization_barrier", "two", lambda x, w: lax.optimization_barrier((x, w)), (X, W)),
    Case(
        "custom_linear_solve",
        "triangular",
        lambda a, b: lax.custom_linear_solve(
            lambda x: a @ x,
            b,
            lambda _, b: lax.linalg.triangular_solve(a, b[:, None], left_side=True, lower=True)[
                :, 0
            ],
        ),
        (np.tril(W) + 4 * np.eye(3, dtype="f4"), X[0]),
    ),
    Case("device_put", "anywhere", jax.device_put, (X,)),
    Case(BOUNDARY, "tree", lambda x, w: stage_boundary({"a": x, "b": (w, 3)}), (X, W)),
    Case(COTANGENT, "gradient", jax.grad(total(lambda x, w: stage_boundary(x @ w)), 1), (X, W)),
    Case("reshard", "cotangent", jax.grad(lambda x: jnp.sum(OVER_MESH(jnp.sum(x)))), (X,)),
    Case(
        TANGENT,
        "forward-mode",
        lambda x: jax.jvp(lambda x: jnp.sin(stage_boundary(x)), (x,), (x,)),
        (X,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    assert {case.primitive for case in CASES} - {""} == {*lower_control.RULES, *lower_flow.RULES}


def ops(function: Any, *args: Any) -> list[str]:
    return [eqn.op.name for eqn in lower(function, *args).eqns]


def test_calls_are_inlined_and_loops_are_kept() -> None:
    assert ops(jax.jit(lambda x: doubled(cubed(x))), X).count("mul") >= 2
    assert ops(rnn, W, X) == ["constant", "broadcast", "scan"]
    assert "while" in ops(newton, X)
    assert "cond" in ops(choose, np.bool_(True), X)


def test_branches_by_platform_need_a_default() -> None:
    with pytest.raises(CaptureError, match=r"test_lower_control.py:\d+: .*add default"):
        lower(lambda x: lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos), X)


def test_a_boundary_inside_a_branch_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"test_lower_control.py:\d+: a stage boundary stands inside a cond"
    ):
        lower(lambda p, x: lax.cond(p, stage_boundary, lambda x: x * 2, x), np.bool_(True), X)
