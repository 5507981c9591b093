"""Cases of the random ops: bit for bit."""

import numpy as np
from op_families.case import OpCase, call, case, named

KEYS = (np.array([0, 0], np.uint32), np.array([0xDEADBEEF, 0xFFFFFFFF], np.uint32))
WORDS = np.array([0, 1, 0xFFFFFFFF, 0x80000000, 0x13198A2E, 0x243F6A88, 12345], np.uint32)


def _cases() -> list[OpCase]:
    shapes = (WORDS, WORDS[:6].reshape(2, 3), WORDS[4], WORDS[:0])
    blocks = [call(x, x[::-1].copy() if x.ndim == 1 else x, x, x) for x in shapes]
    folds = [call(KEYS[0], WORDS[1]), *(call(KEYS[1], word) for word in WORDS[2:4])]
    splits = [call(KEYS[0], num=2), *(call(KEYS[1], num=n) for n in (1, 5, 0))]
    bits = [
        call(KEYS[1], shape=shape, dtype=named(d))
        for d, shape in (("u8", (7,)), ("u16", (2, 3)), ("u32", (5,)), ("u32", ()), ("u64", (2, 3)))
    ]
    bits += [call(KEYS[0], shape=shape, dtype=named("u32")) for shape in ((3, 4), (0, 4))]
    seeds = [np.int32(-5), np.int32(7), np.uint32(0xFFFFFFFF), np.int64(-1), np.int64(1 << 40)]
    seeds += [np.uint64((1 << 63) + 5), np.uint64(3)]
    return [
        case("threefry2x32", "all", *blocks),
        case("fold_in", "all", *folds),
        case("key_split", "all", *splits),
        case("random_bits", "all", *bits),
        case("seed_key", "all", *(call(s) for s in seeds)),
    ]


CASES = _cases()
