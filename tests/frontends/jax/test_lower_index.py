"""Gather and scatter against JAX: every mode, indices out of range, duplicates, batching, gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_checks import Case, check, lower, random, with_gradients

from plait.frontends.jax.lower_index import RULES

X = random((5, 4))
ROWS = np.array([[0, -1, 4], [7, 2, 2]], "i4")
MODES = ("clip", "fill", "promise_in_bounds", "wrap")
INSIDE = np.array([3, 0, 3], "i4")
KEYS = jax.random.split(jax.random.key(0), 5)
BATCH = random((3, 5))
PICKS = np.array([[0, 9], [2, 2], [4, -7]], "i4")


def at(kind: str, mode: str) -> Any:
    def function(x: Any, i: Any, u: Any) -> Any:
        return getattr(x.at[i], kind)(u, mode=mode)

    return function


def windows(x: Any, i: Any) -> Any:
    """Slices of 2 x 3 at two-component indices."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1, 0)
    )
    return lax.gather(x, i, numbers, (2, 3), mode="fill", fill_value=7)


STARTS = np.array([[0, 0], [1, 3], [2, 0], [-1, 0]], "i4")

CASES = [
    *(
        Case(
            "gather",
            f"{d}-{mode}",
            lambda x, i, m=mode: jnp.take(x, i, axis=0, mode=m),
            (random((5, 4), d), ROWS),
        )
        for d in ("f4", "f8", "i4", "u1", "bool", "c8")
        for mode in MODES[:2]
    ),
    Case("gather", "in-bounds", lambda x, i: x.at[i].get(mode="promise_in_bounds"), (X, INSIDE)),
    Case("gather", "wraps", lambda x, i: x[i], (X, np.array([-1, -5, 4], "i4"))),
    Case("gather", "fill-value", lambda x, i: x.at[i].get(mode="fill", fill_value=3.5), (X, ROWS)),
    Case("gather", "int-fill", lambda x, i: x.at[i].get(mode="fill"), (random((5,), "i1"), ROWS)),
    Case("", "gather-no-indices", lambda x, i: jnp.take(x, i, axis=0), (X, np.zeros((0,), "i4"))),
    Case("gather", "columns", lambda x, i: jnp.take(x, i, axis=-1), (X, np.array(2, "i4"))),
    Case("gather", "i64", lambda x, i: x[i], (X, INSIDE.astype("i8"))),
    Case("gather", "u8", lambda x, i: x.at[i].get(mode="clip"), (X, np.array([0, 200], "u1"))),
    Case("gather", "along-axis", lambda x, i: jnp.take_along_axis(x, i, 1), (BATCH, PICKS)),
    Case("gather", "vmap", jax.vmap(lambda x, i: x[i]), (BATCH, PICKS)),
    Case("gather", "windows", windows, (X, STARTS)),
    Case("gather", "keys", lambda k, i: k[i], (KEYS, INSIDE)),
    *(
        Case(
            primitive,
            f"{d}-{mode}",
            at(kind, mode),
            (random((5, 4), d), ROWS, random((2, 3, 4), d, 1, 4)),
        )
        for primitive, kind in {
            "scatter": "set",
            "scatter-add": "add",
            "scatter-sub": "subtract",
            "scatter-mul": "multiply",
            "scatter-min": "min",
            "scatter-max": "max",
        }.items()
        for d in ("f4", "f8", "i4")
        for mode in ("clip", "drop")
    ),
    Case(
        "scatter", "bool", at("set", "drop"), (random((5,), "bool"), INSIDE, random((3,), "bool"))
    ),
    Case(
        "scatter",
        "in-bounds",
        at("set", "promise_in_bounds"),
        (X, np.array([3, 0], "i4"), random((2, 4))),
    ),
    Case("scatter", "columns", lambda x, u: x.at[:, 1].set(u), (X, random((5,)))),
    Case("scatter", "keys", lambda k, i: k.at[i].set(k[0]), (KEYS, np.array([3, 1], "i4"))),
    Case(
        "",
        "scatter-no-indices",
        at("set", "drop"),
        (X, np.zeros((0,), "i4"), np.zeros((0, 4), "f4")),
    ),
    Case("scatter-max", "nan", at("max", "drop"), (X, INSIDE, np.full((3, 4), np.nan, "f4"))),
    Case("scatter-add", "vmap", jax.vmap(lambda x, i: x.at[i].add(1.0)), (BATCH, PICKS)),
    Case(
        "scatter-add", "gather-gradient", with_gradients(lambda x: x[ROWS]), (random((2, 3, 4)), X)
    ),
    Case(
        "gather",
        "scatter-gradient",
        with_gradients(lambda x, u: x.at[INSIDE].add(u)),
        (X, X, random((3, 4))),
    ),
    Case(
        "scatter",
        "set-gradient",
        with_gradients(lambda x, u: x.at[INSIDE].set(u)),
        (X, X, random((3, 4))),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    assert {case.primitive for case in CASES} - {""} == set(RULES)


def test_scatter_that_applies_a_function_is_an_extern() -> None:
    graph = lower(lambda x: x.at[np.array([1, 2])].apply(jnp.sin), X)
    assert "jax:scatter" in [eqn.attrs["target"] for eqn in graph.eqns if eqn.op.name == "extern"]
