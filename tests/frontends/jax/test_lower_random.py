"""Keys and random bits: bit for bit those of JAX, for one key and for arrays of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax_checks import Case, check, lower

from plait.core_ir.errors import CaptureError
from plait.frontends.jax.lower_random import RULES

KEY = jax.random.key(7)
KEYS = jax.random.split(KEY, (2, 3))
WORDS = np.arange(12, dtype=np.uint32).reshape(3, 4)

CASES = [
    *(
        Case("random_seed", f"{d}-{n}", jax.random.key, (np.array(n, d),))
        for d, n in (("i4", 3), ("i4", -5), ("u4", 2**31 + 1), ("i8", 2**40 + 1), ("i8", -2))
    ),
    Case("random_seed", "vmap", jax.vmap(jax.random.key), (np.arange(-1, 3),)),
    Case("random_seed", "vmap-i4", jax.vmap(jax.random.key), (np.arange(-1, 3, dtype="i4"),)),
    Case("random_fold_in", "one", jax.random.fold_in, (KEY, np.uint32(9))),
    Case("random_fold_in", "vmap-keys", jax.vmap(lambda k: jax.random.fold_in(k, 4)), (KEYS[0],)),
    Case(
        "random_fold_in",
        "vmap-data",
        jax.vmap(lambda n: jax.random.fold_in(KEY, n)),
        (np.arange(4),),
    ),
    Case("random_fold_in", "vmap-both", jax.vmap(jax.random.fold_in), (KEYS[0], np.arange(3))),
    Case("random_split", "one", lambda k: jax.random.split(k, 3), (KEY,)),
    Case("random_split", "shape", lambda k: jax.random.split(k, (2, 3)), (KEY,)),
    Case("random_split", "vmap", jax.vmap(lambda k: jax.random.split(k, 3)), (KEYS[0],)),
    *(
        Case(
            "random_bits", f"{d}-{shape}", lambda k, d=d, s=shape: jax.random.bits(k, s, d), (KEY,)
        )
        for d in ("uint8", "uint16", "uint32", "uint64")
        for shape in ((), (5,), (2, 3), (0, 2))
    ),
    *(
        Case(
            "random_bits",
            f"vmap-{d}",
            jax.vmap(lambda k, d=d: jax.random.bits(k, (2, 2), d)),
            (KEYS[0],),
        )
        for d in ("uint8", "uint16", "uint32", "uint64")
    ),
    Case("random_bits", "vmap-vmap", jax.vmap(jax.vmap(lambda k: jax.random.bits(k))), (KEYS,)),
    Case("random_bits", "uniform", lambda k: jax.random.uniform(k, (7,), "f4"), (KEY,)),
    Case("random_bits", "bf16", lambda k: jax.random.uniform(k, (7,), jnp.bfloat16), (KEY,)),
    Case("random_bits", "normal", lambda k: jax.random.normal(k, (7,), "f4"), (KEY,)),
    Case("random_bits", "bernoulli", lambda k: jax.random.bernoulli(k, 0.3, (20,)), (KEY,)),
    Case("random_bits", "randint", lambda k: jax.random.randint(k, (9,), -3, 8), (KEY,)),
    Case(
        "random_bits",
        "categorical",
        lambda k, x: jax.random.categorical(k, x),
        (KEY, WORDS.astype("f4")),
    ),
    Case(
        "random_bits",
        "truncated",
        lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (5,), "f4"),
        (KEY,),
    ),
    Case("random_split", "permutation", lambda k: jax.random.permutation(k, 9), (KEY,)),
    Case(
        "random_wrap",
        "words",
        lambda w: jax.random.bits(jax.random.wrap_key_data(w)),
        (WORDS[0, :2],),
    ),
    Case("random_unwrap", "words", jax.random.key_data, (KEYS,)),
    Case("random_wrap", "old-style", lambda w: jax.random.uniform(w, (3,)), (WORDS[0, :2],)),
    Case("random_clone", "key", jax.random.clone, (KEY,)),
    Case(
        "threefry2x32",
        "counters",
        lambda x: jax.extend.random.threefry_2x32(x[0, :2], x.reshape(-1)),
        (WORDS,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case) -> None:
    check(case.function, *case.args, primitive=case.primitive)


def test_every_rule_has_a_case() -> None:
    assert {case.primitive for case in CASES} == set(RULES)


def test_keys_of_another_implementation_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"'rbg' are not captured.*impl='threefry2x32'"):
        lower(jax.random.bits, jax.random.key(0, impl="rbg"))


def test_bits_that_are_not_partitionable_are_refused() -> None:
    with (
        jax.threefry_partitionable(False),
        pytest.raises(CaptureError, match="jax_threefry_partitionable"),
    ):
        lower(jax.random.bits, KEY)


def test_a_primitive_of_the_users_own_on_keys_is_refused() -> None:
    mixed = Primitive("mixed")  # type: ignore[no-untyped-call]
    mixed.def_abstract_eval(lambda key: key)
    with pytest.raises(CaptureError, match="mixed on PRNG keys has no lowering"):
        lower(mixed.bind, KEY)


def test_keys_cross_a_loop() -> None:
    def walk(key: jax.Array) -> jax.Array:
        def step(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            key, draw = jax.random.split(key)
            return key, jax.random.uniform(draw, (2,), "f4")

        return lax.scan(step, key, None, length=3)[1]

    check(walk, KEY, primitive="scan")
