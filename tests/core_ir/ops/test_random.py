"""Random ops against jax.random, bit for bit, and the published vectors of Threefry."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from plait.core_ir.ops.random import fold_in, key_split, random_bits, seed_key, threefry2x32
from plait.core_ir.types import DTYPES, KEY, TensorType

KEYS = [np.array(k, np.uint32) for k in ([0, 0], [1, 2], [2**32 - 1, 2**31])]
words = st.integers(0, 2**32 - 1)


def jax_key(key: np.ndarray) -> Any:
    return jax.random.wrap_key_data(key, impl="threefry2x32")


@pytest.mark.parametrize(
    ("key", "counter", "block"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry2x32_equals_the_known_answers_of_random123(
    evaluate: Any, key: Any, counter: Any, block: Any
) -> None:
    got = evaluate(threefry2x32, *(np.uint32(n) for n in (*key, *counter)))
    assert tuple(int(n) for n in got) == block


@given(words, words, st.lists(words, max_size=6).filter(lambda x: len(x) % 2 == 0))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_threefry2x32_equals_jax(evaluate: Any, k0: int, k1: int, counters: list[int]) -> None:
    x0, x1 = np.split(np.array(counters, np.uint32), 2)
    keys = [np.full(x0.shape, k, np.uint32) for k in (k0, k1)]
    got = np.concatenate(evaluate(threefry2x32, *keys, x0, x1))
    expected = threefry_2x32(np.array([k0, k1], np.uint32), np.array(counters, np.uint32))
    np.testing.assert_array_equal(got, expected)


def test_threefry2x32_is_elementwise_over_any_shape(evaluate: Any) -> None:
    arrays = np.random.default_rng(0).integers(0, 2**32, (4, 2, 3), dtype=np.uint32)
    y0, y1 = evaluate(threefry2x32, *arrays)
    for i in np.ndindex(2, 3):
        assert [y0[i], y1[i]] == [y[()] for y in evaluate(threefry2x32, *arrays[:, *i])]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("data", [0, 1, 77, 2**31, 2**32 - 1])
def test_fold_in_equals_jax(evaluate: Any, key: np.ndarray, data: int) -> None:
    (got,) = evaluate(fold_in, key, np.uint32(data))
    expected = jax.random.fold_in(jax_key(key), np.uint32(data))
    np.testing.assert_array_equal(got, jax.random.key_data(expected))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("num", [0, 1, 2, 7])
def test_key_split_equals_jax(evaluate: Any, key: np.ndarray, num: int) -> None:
    (got,) = evaluate(key_split, key, num=num)
    expected = jax.random.key_data(jax.random.split(jax_key(key), num))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["u8", "u16", "u32", "u64"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 0, 3)])
@pytest.mark.parametrize("key", KEYS)
def test_random_bits_equal_jax(evaluate: Any, key: Any, shape: Any, dtype: str) -> None:
    (got,) = evaluate(random_bits, key, shape=shape, dtype=DTYPES[dtype])
    with jax.enable_x64(True):
        expected = jax.random.bits(jax_key(key), shape, DTYPES[dtype].numpy)
    np.testing.assert_array_equal(got, expected)


def test_random_bits_of_an_element_depend_on_its_position_alone(evaluate: Any) -> None:
    (short,) = evaluate(random_bits, KEYS[1], shape=(5,), dtype=DTYPES["u32"])
    (long,) = evaluate(random_bits, KEYS[1], shape=(3, 4), dtype=DTYPES["u32"])
    np.testing.assert_array_equal(short, long.reshape(-1)[:5])


@pytest.mark.parametrize("dtype", ["i32", "u32", "i64", "u64"])
@pytest.mark.parametrize(
    "seed", [0, 1, -1, 42, 2**31 - 1, -(2**31), 2**31, 2**40 + 5, -(2**40), 2**63]
)
def test_seed_key_equals_jax(evaluate: Any, seed: int, dtype: str) -> None:
    numpy = DTYPES[dtype].numpy
    info = np.iinfo(numpy)
    if not info.min <= seed <= info.max:
        seed %= info.max
    array = np.array(seed, numpy)
    (got,) = evaluate(seed_key, array)
    with jax.enable_x64(True):
        expected = jax.random.key_data(jax.random.key(array, impl="threefry2x32"))
    np.testing.assert_array_equal(got, expected)


def test_threefry2x32_c1_u32(refuses: Any) -> None:
    refuses(threefry2x32, 1, "u32[2]", "u32[2]", "u32[2]", "i32[2]")


def test_threefry2x32_c2_one_shape(refuses: Any) -> None:
    refuses(threefry2x32, 2, "u32[]", "u32[]", "u32[2]", "u32[2]")


def test_fold_in_c1_key(refuses: Any) -> None:
    refuses(fold_in, 1, "u32[3]", "u32[]")
    refuses(fold_in, 1, "i32[2]", "u32[]")


def test_fold_in_c2_data(refuses: Any) -> None:
    refuses(fold_in, 2, "u32[2]", "i32[]")
    refuses(fold_in, 2, "u32[2]", "u32[1]")


def test_key_split_c1_key(refuses: Any) -> None:
    refuses(key_split, 1, "u32[]", num=2)


def test_key_split_c2_num(refuses: Any) -> None:
    refuses(key_split, 2, "u32[2]", num=-1)


def test_random_bits_c1_key(refuses: Any) -> None:
    refuses(random_bits, 1, "u32[2, 2]", shape=(3,), dtype=DTYPES["u32"])


def test_random_bits_c2_dtype(refuses: Any) -> None:
    for name in ("i32", "f32", "bool"):
        refuses(random_bits, 2, "u32[2]", shape=(3,), dtype=DTYPES[name])


def test_random_bits_c3_sizes(refuses: Any) -> None:
    refuses(random_bits, 3, "u32[2]", shape=(-1,), dtype=DTYPES["u32"])


def test_seed_key_c1_seed(refuses: Any) -> None:
    for seed in ("i16[]", "f32[]", "i32[1]"):
        refuses(seed_key, 1, seed)


def test_flops_count_blocks() -> None:
    bits = TensorType(DTYPES["u32"], (5, 4))
    assert random_bits.flops([KEY], {}, [bits]) == 20 * fold_in.flops([KEY], {}, [KEY])
    assert key_split.flops([KEY], {"num": 3}, []) == 3 * fold_in.flops([KEY], {}, [KEY])
    assert threefry2x32.flops([bits] * 4, {}, [bits, bits]) == random_bits.flops([KEY], {}, [bits])
