"""Emitters of the random ops: Threefry-2x32-20, bit for bit, as 32-bit words held in int64."""

import math

import torch
from torch import Tensor

from plait.backends.torch.carriers import wrap
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.ops import random as ops
from plait.core_ir.types import i32, u64

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF


def _block(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (x0 + k0) & _WORD, (x1 + k1) & _WORD
    for injection in range(1, 6):
        for distance in _ROTATIONS[(injection - 1) % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = (((x1 << distance) | (x1 >> (32 - distance))) & _WORD) ^ x0
        x0 = (x0 + keys[injection % 3]) & _WORD
        x1 = (x1 + keys[(injection + 1) % 3] + injection) & _WORD
    return x0, x1


def _numbered(key: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The blocks of counters 0, 1, ..., num - 1 (64 bits, the high half first)."""
    counter = torch.arange(num, device=key.device)
    return _block(key.select(0, 0), key.select(0, 1), counter >> 32, counter & _WORD)


def _threefry2x32(_: Call, *words: Tensor) -> tuple[Tensor, Tensor]:
    return _block(*words)


def _fold_in(_: Call, key: Tensor, data: Tensor) -> Tensor:
    return torch.stack(_block(key.select(0, 0), key.select(0, 1), torch.zeros_like(data), data))


def _key_split(call: Call, key: Tensor) -> Tensor:
    return torch.stack(_numbered(key, call.attrs["num"]), dim=1)


def _random_bits(call: Call, key: Tensor) -> Tensor:
    shape, dtype = call.attrs["shape"], call.attrs["dtype"]
    first, second = _numbered(key, math.prod(shape))
    bits = (first << 32) | second if dtype == u64 else wrap(first ^ second, dtype)
    return bits.reshape(shape)


def _seed_key(call: Call, seed: Tensor) -> Tensor:
    bits = seed.to(torch.int64)
    high = torch.zeros_like(bits) if call.dtype == i32 else (bits >> 32) & _WORD
    return torch.stack((high, bits & _WORD))


EMITTERS: Table = {
    ops.threefry2x32: _threefry2x32,
    ops.fold_in: _fold_in,
    ops.key_split: _key_split,
    ops.random_bits: _random_bits,
    ops.seed_key: _seed_key,
}
