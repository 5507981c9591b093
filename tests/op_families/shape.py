"""Cases of the shape ops."""

import numpy as np
from op_families.case import ALL, OpCase, call, case, edges, named, random

from plait.core_ir.op import Literal

MIXED = ("f32", "bool", "i64", "u32", "bf16", "c64", "f8e4m3fn", "u64", "u16")


def _constants() -> list[OpCase]:
    calls = [call(value=Literal(edges(d))) for d in ALL]
    calls += [call(value=Literal(np.full((2, 3), edges(d)[-1]))) for d in ALL]
    calls += [call(value=Literal(np.array(x))) for x in (1.5, -0.0, 3, True, np.nan, 2 + 1j)]
    calls += [call(value=Literal(np.zeros((0, 2), np.float32)))]
    iotas = [
        call(dtype=named(d), shape=shape, dim=dim)
        for d in ("i32", "f32", "u32", "bf16", "u8", "i64", "f8e5m2", "c64")
        for shape, dim in (((5,), 0), ((2, 3), 0), ((2, 3), 1), ((0, 2), 1))
    ]
    return [case("constant", "all", *calls), case("iota", "all", *iotas)]


def _moving() -> list[OpCase]:
    cases = []
    calls = [call(random(d, 2, 3, 2), shape=(4, 3)) for d in MIXED]
    calls += [call(random("f32", 1), shape=()), call(random("f32", 0, 3), shape=(3, 0, 2))]
    cases.append(case("reshape", "all", *calls))
    calls = [call(random(d, 2, 3, 4), permutation=(2, 0, 1)) for d in MIXED]
    calls += [call(random("f32"), permutation=()), call(random("f32", 0, 3), permutation=(1, 0))]
    cases.append(case("transpose", "all", *calls))
    calls = [call(random(d, 3, 1), shape=(2, 3, 4), dims=(1, 2)) for d in MIXED]
    calls += [
        call(random("f32"), shape=(2, 3), dims=()),
        call(random("f32", 3), shape=(3, 2), dims=(0,)),
        call(random("f32", 1), shape=(0, 2), dims=(0,)),
        call(random("f32", 2, 3), shape=(2, 3), dims=(0, 1)),
    ]
    cases.append(case("broadcast", "all", *calls))
    calls = [call(random(d, 5, 4), start=(1, 0), limit=(5, 3), strides=(2, 1)) for d in MIXED]
    calls += [
        call(random("f32", 5, 4), start=(2, 1), limit=(2, 4), strides=(1, 3)),
        call(random("f32"), start=(), limit=(), strides=()),
        call(random("f32", 5, 4), start=(0, 0), limit=(5, 4), strides=(1, 1)),
    ]
    cases.append(case("slice", "all", *calls))
    calls = [
        call(random(d, 2, 3), random(d, seed=7), low=(1, 0), high=(2, 1), interior=(0, 2))
        for d in MIXED
    ]
    calls += [
        call(
            random("f32", 4, 3), random("f32", seed=1), low=(-1, 2), high=(-2, -1), interior=(0, 1)
        ),
        call(random("f32", 0), random("f32", seed=1), low=(1,), high=(2,), interior=(3,)),
        call(random("f32"), random("f32", seed=1), low=(), high=(), interior=()),
        call(random("f32", 4), random("f32", seed=1), low=(-4,), high=(2,), interior=(0,)),
    ]
    cases.append(case("pad", "all", *calls))
    calls = [call(random(d, 2, 3), random(d, 2, 1), random(d, 2, 0), dim=1) for d in MIXED]
    calls += [call(random("f32", 2, 3), dim=0), call(random("f32", 0), random("f32", 0), dim=0)]
    cases.append(case("concatenate", "all", *calls))
    calls = [call(random(d, 2, 3, 2), dims=(0, 2)) for d in MIXED]
    calls += [call(random("f32", 3), dims=()), call(random("f32", 0, 3), dims=(0, 1))]
    cases.append(case("reverse", "all", *calls))
    return cases


def _dynamic() -> list[OpCase]:
    slices, updates = [], []
    for start in (np.int32(1), np.int32(-4), np.int32(9), np.int64(2)):
        other = start.dtype.type(0)
        slices.append(call(random("f32", 5, 3), start, other, sizes=(2, 3)))
        updates.append(call(random("f32", 5, 3), random("f32", 2, 2, seed=1), start, other))
    slices += [call(random(d, 4), np.int32(1), sizes=(2,)) for d in MIXED]
    updates += [call(random(d, 4), random(d, 2, seed=1), np.int32(1)) for d in MIXED]
    slices += [call(random("f32"), sizes=()), call(random("f32", 3), np.int32(1), sizes=(0,))]
    updates += [call(random("f32"), random("f32", seed=1))]
    updates += [call(random("f32", 3), random("f32", 0), np.int32(1))]
    return [case("dynamic_slice", "all", *slices), case("dynamic_update_slice", "all", *updates)]


CASES = [*_constants(), *_moving(), *_dynamic()]
