"""Random bits: Threefry-2x32 with 20 rounds.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). Keys are u32[2]. Everything is
bit for bit what jax.random gives with jax_threefry_partitionable=True: element i of an array is the
block of its row-major position i, whatever else is computed.
"""

import math
from collections.abc import Sequence

import numpy as np

from plait.core_ir.op import Array, Attrs, Op, Run, Types, dtype_attr, int_attr, ints_attr
from plait.core_ir.types import KEY, TensorType, i32, i64, u8, u16, u32, u64

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_BLOCK_FLOPS = 120
"""Integer operations of one block: 20 rounds of 5, 5 key injections of 3, the start."""


def _rotate_left(x: Array, distance: int) -> Array:
    return (x << np.uint32(distance)) | (x >> np.uint32(32 - distance))


def _block(k0: Array, k1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    """The Threefry-2x32-20 block, elementwise over u32 arrays of one shape."""
    with np.errstate(over="ignore"):
        keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
        x0, x1 = x0 + k0, x1 + k1
        for injection in range(1, 6):
            for distance in _ROTATIONS[(injection - 1) % 2]:
                x0 = x0 + x1
                x1 = _rotate_left(x1, distance) ^ x0
            x0 = x0 + keys[injection % 3]
            x1 = x1 + keys[(injection + 1) % 3] + np.uint32(injection)
    return x0, x1


def _numbered_blocks(key: Array, num: int) -> tuple[Array, Array]:
    """The blocks of counters 0, 1, ..., num - 1 (64 bits, the high half first)."""
    counter = np.arange(num, dtype=np.uint64)
    high, low = (counter >> np.uint64(32)).astype(np.uint32), counter.astype(np.uint32)
    return _block(key[:1], key[1:], high, low)


def _block_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    threefry2x32.require(1, all(t.dtype == u32 for t in types), types)
    threefry2x32.require(2, all(t == types[0] for t in types), types)
    return (types[0], types[0])


threefry2x32 = Op(
    "threefry2x32",
    _block_infer,
    lambda operands, attrs, run: _block(*map(np.asarray, operands)),
    4,
    (),
    ("the operands are u32", "the operands have one shape"),
    flops=lambda types, attrs, results: _BLOCK_FLOPS * results[0].size,
    doc="(k0, k1, x0, x1) -> (y0, y1): the block with key (k0, k1) and counter (x0, x1), "
    "elementwise.",
)


def _fold_in_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    key, data = types
    fold_in.require(1, key == KEY, key)
    fold_in.require(2, data == TensorType(u32, ()), data)
    return (KEY,)


def _fold_in_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    key, data = operands
    data = data.reshape(1)
    return (np.concatenate(_block(key[:1], key[1:], np.zeros_like(data), data)),)


fold_in = Op(
    "fold_in",
    _fold_in_infer,
    _fold_in_evaluate,
    2,
    (),
    ("key is u32[2]", "data is u32[]"),
    flops=lambda types, attrs, results: _BLOCK_FLOPS,
    doc="(key, data) -> a new key, another one for each number.",
)


def _key_split_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    key_split.require(1, types[0] == KEY, types[0])
    key_split.require(2, attrs["num"] >= 0, attrs["num"])
    return (TensorType(u32, (attrs["num"], 2)),)


def _key_split_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    return (np.stack(_numbered_blocks(operands[0], attrs["num"]), axis=1),)


key_split = Op(
    "key_split",
    _key_split_infer,
    _key_split_evaluate,
    1,
    (int_attr("num"),),
    ("key is u32[2]", "num >= 0"),
    flops=lambda types, attrs, results: _BLOCK_FLOPS * attrs["num"],
    doc="key -> `num` new keys, u32[num, 2].",
)


def _random_bits_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    random_bits.require(1, types[0] == KEY, types[0])
    random_bits.require(2, attrs["dtype"] in (u8, u16, u32, u64), attrs["dtype"])
    random_bits.require(3, all(d >= 0 for d in attrs["shape"]), attrs["shape"])
    return (TensorType(attrs["dtype"], attrs["shape"]),)


def _random_bits_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    shape, dtype = attrs["shape"], attrs["dtype"]
    first, second = _numbered_blocks(operands[0], math.prod(shape))
    if dtype == u64:
        bits = (first.astype(np.uint64) << np.uint64(32)) | second
    else:
        bits = (first ^ second).astype(dtype.numpy)
    return (bits.reshape(shape),)


random_bits = Op(
    "random_bits",
    _random_bits_infer,
    _random_bits_evaluate,
    1,
    (ints_attr("shape"), dtype_attr()),
    ("key is u32[2]", "dtype is u8, u16, u32 or u64", "sizes are not negative"),
    flops=lambda types, attrs, results: _BLOCK_FLOPS * results[0].size,
    doc="key -> independent uniform bits. An element depends on the key and its row-major position "
    "alone.",
)


def _seed_key_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    seed_key.require(1, types[0].rank == 0 and types[0].dtype in (i32, i64, u32, u64), types[0])
    return (KEY,)


def _seed_key_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    (seed,) = operands
    bits = int(seed) % 2 ** (8 * seed.dtype.itemsize)
    return (np.array([bits >> 32, bits % 2**32], np.uint32),)


seed_key = Op(
    "seed_key",
    _seed_key_infer,
    _seed_key_evaluate,
    1,
    (),
    ("seed is i32[], u32[], i64[] or u64[]",),
    doc="seed -> its key: the high and the low 32 bits of the seed, where a 32-bit seed has high "
    "bits 0.",
)

FAMILY: tuple[Op, ...] = (threefry2x32, fold_in, key_split, random_bits, seed_key)
