"""Primitives that move data against JAX, on arrays and on arrays of keys."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax_checks import Case, check, random, with_gradients

from plait.frontends.jax.lower_shape import RULES

X, Y = random((3, 4, 5)), random((3, 2, 5))
KEYS = jax.random.split(jax.random.key(0), (3, 4))
I32 = np.int32


def update(x: Any, u: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(x, u, starts)


CASES = [
    *(
        Case(
            "iota",
            f"{np.dtype(d).name}-{dim}",
            lambda d=d, dim=dim: lax.broadcasted_iota(d, (3, 4), dim),
            (),
        )
        for d in ("i4", "f4", "u1", "i8", ml_dtypes.bfloat16, "c8")
        for dim in (0, 1)
    ),
    Case("iota", "empty", lambda: lax.broadcasted_iota("i4", (0, 2), 1), ()),
    Case("empty", "product", lambda x: lax.empty((3, 0), "f4") * x, (np.float32(2),)),
    Case(
        "empty2",
        "branches",
        jax.grad(
            lambda x, p: jnp.sum(lax.cond(p, lambda x: x * X[0], lambda x: x @ X[1].T @ X[1], x))
        ),
        (X[2], np.bool_(True)),
    ),
    Case("broadcast_in_dim", "scalar", lambda x: lax.broadcast(x, (2, 3)), (np.float32(2),)),
    Case(
        "broadcast_in_dim", "inner", lambda x: lax.broadcast_in_dim(x, (4, 2, 5), (0, 2)), (X[0],)
    ),
    Case(
        "broadcast_in_dim",
        "size-1",
        lambda x: lax.broadcast_in_dim(x, (3, 2, 5), (0, 1, 2)),
        (X[:, :1],),
    ),
    Case(
        "broadcast_in_dim",
        "new-size-1",
        lambda x: lax.broadcast_in_dim(x, (4, 1, 5, 1), (0, 2)),
        (X[0],),
    ),
    Case("broadcast_in_dim", "empty", lambda x: lax.broadcast_in_dim(x, (0, 5), (1,)), (X[0, 0],)),
    Case("broadcast_in_dim", "bool", lambda x: lax.broadcast(x, (2,)), (random((3,), "bool"),)),
    Case("broadcast_in_dim", "keys", lambda k: lax.broadcast_in_dim(k, (2, 3, 4), (1, 2)), (KEYS,)),
    Case("broadcast_in_dim", "keys-new", lambda k: jnp.expand_dims(k, (0, 2)), (KEYS,)),
    Case("reshape", "merge", lambda x: lax.reshape(x, (12, 5)), (X,)),
    Case("reshape", "dimensions", lambda x: lax.reshape(x, (5, 12), dimensions=(2, 0, 1)), (X,)),
    Case("reshape", "empty", lambda x: lax.reshape(x, (0, 7)), (np.zeros((0, 3), "f4"),)),
    Case("reshape", "scalar", lambda x: lax.reshape(x, ()), (X[:1, :1, 0],)),
    Case("reshape", "keys", lambda k: k.reshape(12), (KEYS,)),
    Case("squeeze", "one", lambda x: lax.squeeze(x, (-1,)), (X[..., :1],)),
    Case("squeeze", "keys", lambda k: lax.squeeze(k, (0,)), (KEYS[:1],)),
    Case("transpose", "three", lambda x: lax.transpose(x, (2, 0, 1)), (X,)),
    Case("transpose", "keys", lambda k: k.T, (KEYS,)),
    Case("transpose", "gradient", with_gradients(lambda x: x.T), (random((5, 4, 3)), X)),
    Case("rev", "two", lambda x: lax.rev(x, (0, 2)), (X,)),
    Case("rev", "keys", lambda k: k[::-1], (KEYS,)),
    Case("slice", "plain", lambda x: lax.slice(x, (0, 1, 2), (3, 4, 4)), (X,)),
    Case("slice", "strides", lambda x: lax.slice(x, (0, 1, 0), (3, 4, 5), (2, 2, 3)), (X,)),
    Case("slice", "whole", lambda x: lax.slice(x, (0, 0, 0), X.shape), (X,)),
    Case("slice", "empty", lambda x: lax.slice(x, (1, 0, 0), (1, 4, 5)), (X,)),
    Case("slice", "keys", lambda k: k[1:3, ::2], (KEYS,)),
    Case("slice", "gradient", with_gradients(lambda x: x[1:, ::2]), (random((2, 2, 5)), X)),
    Case("split", "uneven", lambda x: lax.split(x, (1, 0, 3), axis=1), (X,)),
    Case("split", "keys", lambda k: lax.split(k, (1, 3), axis=1), (KEYS,)),
    Case(
        "split",
        "gradient",
        with_gradients(lambda x: jnp.split(x, 2, axis=-2)),
        ([random((3, 2, 5))] * 2, X),
    ),
    Case(
        "pad",
        "low-high",
        lambda x: lax.pad(x, np.float32(7), ((1, 2, 0), (0, 0, 0), (0, 1, 2))),
        (X,),
    ),
    Case(
        "pad",
        "negative",
        lambda x: lax.pad(x, np.float32(7), ((-1, 2, 0), (0, -2, 0), (1, -1, 1))),
        (X,),
    ),
    Case("pad", "empty", lambda x: lax.pad(x, np.float32(7), ((2, 1, 3),)), (np.zeros(0, "f4"),)),
    Case("stack", "first", lambda x, y: jnp.stack([x, y]), (X, X + 1)),
    Case("stack", "last", lambda x, y: jnp.stack([x, y, x], -1), (X, X + 1)),
    Case("stack", "scalars", lambda x: jnp.stack([x, x * 2]), (np.float32(3),)),
    Case("stack", "keys", lambda k: lax.stack([k, k], 2), (KEYS,)),
    Case(
        "stack",
        "gradient",
        with_gradients(lambda x, y: jnp.stack([x, y], 1)),
        (random((3, 2, 4, 5)), X, X + 1),
    ),
    Case("stack", "vmap", jax.vmap(lambda x, y: jnp.stack([x, y], 1), (0, None)), (X, X[0])),
    Case("unstack", "middle", lambda x: jnp.unstack(x, axis=1), (X,)),
    Case("unstack", "vector", lambda x: jnp.unstack(x), (X[0, 0],)),
    Case("unstack", "keys", lambda k: lax.unstack(k, 1), (KEYS,)),
    Case("unstack", "gradient", with_gradients(lambda x: lax.unstack(x, 2)), ((X[..., 0],) * 5, X)),
    Case("tile", "all", lambda x: jnp.tile(x, (2, 1, 3)), (X,)),
    Case("tile", "more", lambda x: jnp.tile(x, (2, 2, 1, 1)), (X,)),
    Case("tile", "none", lambda x: jnp.tile(x, (0, 1, 2)), (X,)),
    Case("tile", "keys", lambda k: lax.tile(k, (2, 3)), (KEYS,)),
    Case(
        "tile",
        "gradient",
        with_gradients(lambda x: jnp.tile(x, (2, 1, 3))),
        (random((6, 4, 15)), X),
    ),
    Case("concatenate", "three", lambda x, y: lax.concatenate([x, y, x], 1), (X, Y)),
    Case("concatenate", "keys", lambda k: jnp.concatenate([k, k]), (KEYS,)),
    Case(
        "concatenate",
        "gradient",
        with_gradients(lambda x, y: jnp.concatenate([x, y], 1)),
        (random((3, 6, 5)), X, Y),
    ),
    *(
        Case(
            "dynamic_slice",
            f"{n}-{d}",
            lambda x, i: lax.dynamic_slice(x, (i, i, i), (2, 2, 3)),
            (X, np.array(n, d)),
        )
        for d, n in (("i4", 1), ("i8", -1), ("u1", 200), ("u4", 2**32 - 1), ("i4", 99), ("u8", 3))
    ),
    Case("dynamic_slice", "keys", lambda k, i: lax.dynamic_index_in_dim(k, i), (KEYS, I32(2))),
    Case(
        "dynamic_slice",
        "gradient",
        with_gradients(lambda x: lax.dynamic_slice(x, (I32(2), I32(9), I32(0)), (2, 2, 5))),
        (random((2, 2, 5)), X),
    ),
    Case("dynamic_update_slice", "plain", update, (X, Y, I32(0), I32(1), I32(0))),
    Case("dynamic_update_slice", "clamped", update, (X, Y, I32(5), I32(9), I32(-1))),
    Case(
        "dynamic_update_slice",
        "keys",
        lambda k, i: lax.dynamic_update_index_in_dim(k, k[0], i, 0),
        (KEYS, I32(2)),
    ),
    Case(
        "dynamic_update_slice",
        "gradient",
        with_gradients(lambda x, u: update(x, u, 1, 1, 0)),
        (X, X, Y),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    assert {case.primitive for case in CASES} == set(RULES)
