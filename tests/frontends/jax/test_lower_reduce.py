"""Reductions, cumulative primitives, windows and sorting against JAX: ties, NaN, empty and negative dims."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax_checks import Case, check, random, with_gradients

from plait.frontends.jax.lower_reduce import RULES

BF16 = ml_dtypes.bfloat16
FLOATS = ("f4", "f8", "f2", BF16)
X = random((3, 4, 5))
TIES = np.array([[1, 3, 3, 2], [0, 0, 0, 0], [2, 1, 2, 1]], "f4")
HOLES = np.array([[1, np.nan, 3, np.nan], [np.nan] * 4, [-np.inf, 2, np.inf, 1]], "f4")
ZEROS = np.array([[0.0, -0.0, 0.0, -0.0]], "f4")
IMAGE = random((2, 6, 7, 3))

REDUCE = {
    "reduce_sum": jnp.sum,
    "reduce_prod": jnp.prod,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
}
CUMULATIVE = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
}
ARG = {"argmax": lax.argmax, "argmin": lax.argmin}


def window(x: Any, start: Any, combine: Any, **more: Any) -> Any:
    sizes = {"window_dimensions": (1, 3, 2, 1), "window_strides": (1, 2, 1, 1), "padding": "VALID"}
    return lax.reduce_window(x, np.asarray(start, x.dtype), combine, **(sizes | more))


WINDOWS = {
    "reduce_window_sum": (0, lax.add),
    "reduce_window_max": (-np.inf, lax.max),
    "reduce_window_min": (np.inf, lax.min),
}
WINDOW_SHAPES = {
    "valid": {},
    "same": {"padding": "SAME"},
    "dilated": {"base_dilation": (1, 2, 1, 1), "window_dilation": (1, 1, 2, 1)},
    "negative-padding": {"padding": ((0, 0), (-1, 2), (1, -1), (0, 0))},
}

CASES = [
    *(
        Case(
            p,
            f"{np.dtype(d).name}-{axes}",
            lambda x, f=f, axes=axes: f(x, axis=axes),
            (random((3, 4, 5), d, 0.5, 2),),
        )
        for p, f in REDUCE.items()
        for d in (*FLOATS, "i4")
        for axes in (None, -1, (0, 2))
    ),
    *(Case(p, "nan", lambda x, f=f: f(x, axis=1), (HOLES,)) for p, f in REDUCE.items()),
    *(
        Case(p, "no-dims", lambda x, f=f: f(x, axis=()), (X,))
        for p, f in REDUCE.items()
        if p != "reduce_sum"
    ),
    Case("reduce_sum", "empty", jnp.sum, (np.zeros((0, 3), "f4"),)),
    Case("reduce_prod", "empty", lambda x: jnp.prod(x, 0), (np.zeros((0, 3), "f4"),)),
    Case("reduce_max", "empty", lambda x: lax.reduce_max(x, (0,)), (np.zeros((0, 3), "f4"),)),
    Case("reduce_min", "empty", lambda x: lax.reduce_min(x, (0,)), (np.zeros((0, 3), "i4"),)),
    Case("reduce_max", "bool", lambda x: lax.reduce_max(x, (0,)), (random((4, 3), "bool"),)),
    Case("reduce_min", "bool", lambda x: lax.reduce_min(x, (0,)), (random((4, 3), "bool"),)),
    Case("reduce_sum", "complex", jnp.sum, (random((3, 4), "c8"),)),
    *(
        Case(
            "", f"{p}-gradient", with_gradients(lambda x, f=f: f(x, axis=-1)), (random((3,)), TIES)
        )
        for p, f in REDUCE.items()
    ),
    Case("reduce_and", "bool", lambda x: jnp.all(x, 1), (random((3, 4), "bool"),)),
    Case("reduce_or", "bool", lambda x: jnp.any(x, 1), (random((3, 4), "bool"),)),
    Case("reduce_and", "empty", jnp.all, (np.zeros((0,), "bool"),)),
    *(
        Case(p, f"{name}-{dtype}", lambda x, f=f, t=dtype: f(x, 1, t), (x,))
        for p, f in ARG.items()
        for name, x in {
            "ties": TIES,
            "nan": HOLES,
            "zeros": ZEROS,
            "int": TIES.astype("i4"),
            "bf16": TIES.astype(BF16),
            "bool": TIES > 1,
        }.items()
        for dtype in ("int32", "int64")
    ),
    *(
        Case(
            p,
            f"{np.dtype(d).name}-{reverse}",
            lambda x, f=f, r=reverse: f(x, 1, r),
            (random((3, 4, 5), d, 0.5, 2),),
        )
        for p, f in CUMULATIVE.items()
        for d in (*FLOATS[:3], *(("i4",) if p != "cumlogsumexp" else ()))
        for reverse in (False, True)
    ),
    *(Case(p, "nan", lambda x, f=f: f(x, 1), (HOLES,)) for p, f in CUMULATIVE.items()),
    *(
        Case(p, "empty", lambda x, f=f: f(x, 0), (np.zeros((0, 2), "f4"),))
        for p, f in CUMULATIVE.items()
    ),
    *(
        Case(
            "",
            f"{p}-gradient",
            with_gradients(lambda x, f=f: f(x, 1, True)),
            (random((2, 4)), random((2, 4), low=0.5)),
        )
        for p, f in CUMULATIVE.items()
    ),
    *(
        Case(p, "mapped", jax.vmap(lambda x, f=f: f(x, "rows"), axis_name="rows"), (X,))
        for p, f in {"psum": lax.psum, "pmax": lax.pmax, "pmin": lax.pmin}.items()
    ),
    Case(
        "psum",
        "mean-gradient",
        jax.grad(lambda x: jax.vmap(lambda x: lax.pmean(x**2, "rows"), axis_name="rows")(x).sum()),
        (X,),
    ),
    *(
        Case(
            p,
            f"{name}-{np.dtype(d).name}",
            lambda x, s=start, c=combine, m=more: window(x, s, c, **m),
            (IMAGE.astype(d),),
        )
        for p, (start, combine) in WINDOWS.items()
        for name, more in WINDOW_SHAPES.items()
        for d in ("f4", "f8")
    ),
    *(
        Case(p, "bf16", lambda x, s=start, c=combine: window(x, s, c), (IMAGE.astype(BF16),))
        for p, (start, combine) in WINDOWS.items()
    ),
    Case(
        "reduce_window_sum",
        "gradient",
        with_gradients(lambda x: nn.avg_pool(x, (2, 2), (2, 2), "SAME")),
        (random((2, 3, 4, 3)), IMAGE),
    ),
    Case(
        "select_and_scatter_add",
        "max",
        with_gradients(lambda x: nn.max_pool(x, (2, 2), (2, 2))),
        (random((2, 3, 3, 3)), IMAGE),
    ),
    Case(
        "select_and_scatter_add",
        "overlap",
        with_gradients(lambda x: nn.max_pool(x, (3, 3), (1, 2), "SAME")),
        (random((2, 6, 4, 3)), IMAGE),
    ),
    Case(
        "select_and_scatter_add",
        "ties",
        with_gradients(lambda x: nn.max_pool(x, (2, 2), (1, 1))),
        (random((1, 2, 3, 1)), TIES[None, :, :, None]),
    ),
    Case(
        "select_and_scatter_add",
        "min",
        with_gradients(
            lambda x: window(
                x, np.inf, lax.min, window_dimensions=(1, 2, 2, 1), window_strides=(1, 1, 1, 1)
            )
        ),
        (random((1, 2, 3, 1)), TIES[None, :, :, None]),
    ),
    *(
        Case("sort", name, lambda x: lax.sort(x, dimension=1), (x,))
        for name, x in {
            "ties": TIES,
            "nan": HOLES,
            "int": TIES.astype("i4"),
            "bf16": HOLES.astype(BF16),
            "bool": TIES > 1,
        }.items()
    ),
    Case(
        "sort",
        "stable",
        lambda x, y: lax.sort([x, y], dimension=-1, num_keys=1),
        (TIES, random((3, 4), "i4")),
    ),
    Case(
        "sort",
        "two-keys",
        lambda x, y, z: lax.sort([x, y, z], dimension=0, num_keys=2),
        (TIES, random((3, 4), "i4"), X[:, :, 0]),
    ),
    Case("sort", "zeros", lambda x: jnp.argsort(x, axis=1), (ZEROS,)),
    Case("sort", "descending", lambda x: jnp.sort(x, descending=True), (TIES,)),
    Case(
        "sort",
        "gradient",
        with_gradients(lambda x: lax.sort(x, dimension=1)),
        (random((3, 4)), TIES),
    ),
    *(
        Case("top_k", f"{name}-{k}", lambda x, k=k: lax.top_k(x, k), (x,))
        for name, x in {
            "ties": TIES,
            "nan": HOLES,
            "int": TIES.astype("i4"),
            "bf16": TIES.astype(BF16),
        }.items()
        for k in (1, 3)
    ),
    Case("approx_top_k", "largest", lambda x: lax.approx_max_k(x, 2), (TIES,)),
    Case(
        "approx_top_k",
        "least-first-dim",
        lambda x: lax.approx_min_k(x, 2, reduction_dimension=0),
        (random((5, 3)),),
    ),
    Case("top_k", "first-dim", lambda x: lax.top_k(x, 2, axis=0), (TIES,)),
    Case("top_k", "gradient", with_gradients(lambda x: lax.top_k(x, 2)[0]), (random((3, 2)), TIES)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    mapped = {"psum", "pmax", "pmin"}  # collectives, whose rules stand elsewhere
    assert {case.primitive for case in CASES} - {""} == set(RULES) | mapped
