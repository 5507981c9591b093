"""Primitives that are functions of arrays against JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax_checks import Case, check, random, with_gradients

from plait.frontends.jax.lower_traced import RULES

KEY = jax.random.key(3)
BF16 = ml_dtypes.bfloat16


def positive(*shape: int, dtype: Any = "f4", high: float = 4) -> Any:
    return random(shape, dtype, 0.1, high)


def shares(dtype: Any = "f4") -> tuple[Any, Any, Any]:
    return positive(7, dtype=dtype), positive(7, dtype=dtype), random((7,), dtype, 0.05, 0.95)


BESSEL = np.array([0, -0.0, 1e-30, -1e-3, 0.5, -7.9, 8, 8.1, 50, -1e6, np.inf, np.nan], "f8")
SPECIAL = np.array([1, 1, 0.5, 2, 2, 2.5, 3, 3, np.nan, 2], "f8")
PLACES = np.array([2, -1, 1, 0, -0.5, -0.5, -2, 1e8, 1, np.nan], "f8")

CASES = [
    Case("bessel_i0e", "f4", lax.bessel_i0e, (random((9,), "f4", -20, 20),)),
    *(
        Case("bessel_i1e", np.dtype(d).name, lax.bessel_i1e, (BESSEL.astype(d),))
        for d in ("f4", "f8", BF16)
    ),
    Case("bessel_i1e", "gradient", with_gradients(lax.bessel_i1e), (random((9,)), random((9,)))),
    Case("bessel_i0e", "f8", lax.bessel_i0e, (random((9,), "f8", -20, 20),)),
    *(
        Case(
            name, np.dtype(d).name, getattr(lax, name), (positive(9, dtype=d), positive(9, dtype=d))
        )
        for name in ("igamma", "igammac", "igamma_grad_a")
        for d in ("f4", "f8")
    ),
    Case("igamma", "bf16", lax.igamma, (positive(9).astype(BF16), positive(9).astype(BF16))),
    Case(
        "igamma", "gradient", with_gradients(lax.igamma), (random((9,)), positive(9), positive(9))
    ),
    Case("regularized_incomplete_beta", "f4", lax.betainc, shares()),
    Case("regularized_incomplete_beta", "f8", lax.betainc, shares("f8")),
    Case(
        "regularized_incomplete_beta",
        "gradient",
        lambda a, b, x: jax.grad(lambda x: lax.betainc(a, b, x).sum())(x),
        shares(),
    ),
    *(
        Case("zeta", np.dtype(d).name, lax.zeta, (positive(9, dtype=d) + 1, positive(9, dtype=d)))
        for d in ("f4", "f8")
    ),
    Case("zeta", "special", lax.zeta, (SPECIAL, PLACES)),
    *(
        Case(
            "polygamma",
            f"{n}-{np.dtype(d).name}",
            lax.polygamma,
            (np.full(9, n, d), positive(9, dtype=d)),
        )
        for n in (0, 1, 2, 5)
        for d in ("f4", "f8")
    ),
    Case("polygamma", "bf16", lax.polygamma, (np.ones(9, BF16), positive(9).astype(BF16))),
    Case("polygamma", "odd", lax.polygamma, (np.array([1.5, -1, 1, 2]), np.array([2, 2, -0.5, 0]))),
    Case("polygamma", "of-digamma", jax.grad(lambda x: lax.digamma(x).sum()), (positive(9),)),
    Case("random_gamma", "one", lambda a: jax.random.gamma(KEY, a), (positive(6),)),
    Case("random_gamma", "wide", lambda a: jax.random.gamma(KEY, a), (positive(2, 3, dtype="f8"),)),
    Case("random_gamma", "logarithm", lambda a: jax.random.loggamma(KEY, a), (positive(6),)),
    Case("random_gamma", "beta", lambda a: jax.random.beta(KEY, a, 2.0), (positive(6),)),
    Case("random_gamma", "dirichlet", lambda a: jax.random.dirichlet(KEY, a, (2,)), (positive(6),)),
    Case(
        "random_gamma",
        "keys",
        lambda k, a: jax.vmap(jax.random.gamma)(k, a),
        (jax.random.split(KEY, 3), positive(3)),
    ),
    Case(
        "random_gamma",
        "gradient",
        jax.grad(lambda a: jnp.sum(jax.random.gamma(KEY, a) ** 2)),
        (positive(5),),
    ),
    Case(
        "reduce",
        "pair",
        lambda x: lax.reduce(
            (x, x), (0.0, -np.inf), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0, 2)
        ),
        (random((3, 4, 5), "f8"),),
    ),
    Case(
        "reduce",
        "log-add",
        lambda x: lax.reduce(x, -np.inf, jnp.logaddexp, (1,)),
        (random((3, 4), "f8"),),
    ),
    Case(
        "reduce",
        "all",
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 0.0, (0, 1)),
        (positive(3, 2, dtype="f8"),),
    ),
    Case(
        "reduce",
        "nothing",
        lambda x: lax.reduce(x, 7.0, lambda a, b: a * b + 0.0, (0,)),
        (np.zeros((0, 2)),),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    assert {case.primitive for case in CASES} == set(RULES)
