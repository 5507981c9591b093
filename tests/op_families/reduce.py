"""Cases of the reductions, windows, cumulative ops and sorts."""

import numpy as np
from op_families.case import COMPLEX, FLOATS, INTEGERS, OpCase, call, case, named, random, ties

WINDOWS = (
    dict(
        window=(1, 3),
        strides=(1, 2),
        padding=((0, 0), (1, 1)),
        base_dilation=(1, 1),
        window_dilation=(1, 1),
    ),
    dict(
        window=(2, 2),
        strides=(2, 1),
        padding=((1, 0), (0, 2)),
        base_dilation=(1, 1),
        window_dilation=(1, 2),
    ),
    dict(
        window=(3, 2),
        strides=(1, 1),
        padding=((0, 1), (2, 0)),
        base_dilation=(2, 3),
        window_dilation=(1, 1),
    ),
    dict(
        window=(2, 1),
        strides=(1, 1),
        padding=((-1, 0), (0, -1)),
        base_dilation=(1, 1),
        window_dilation=(1, 1),
    ),
)


def _shapes(dtype: str) -> list[object]:
    return [
        call(random(dtype, 2, 3, 4), dims=(1,)),
        call(random(dtype, 2, 3, 4), dims=(0, 2)),
        call(random(dtype, 2, 3), dims=(0, 1)),
        call(random(dtype, 2, 3), dims=()),
        call(random(dtype), dims=()),
        call(random(dtype, 0, 3), dims=(0,)),
        call(random(dtype, 0, 3), dims=(1,)),
        call(random(dtype, 2, 0, 3), dims=(0, 1)),
    ]


def _reductions() -> list[OpCase]:
    cases = []
    for op in ("reduce_sum", "reduce_prod"):
        calls = [call(random(d, 3, 5), dims=(0,)) for d in (*FLOATS, *COMPLEX)]
        cases.append(case(op, "float", *calls, *_shapes("f32"), tolerance="summed"))
        calls = [call(ties(d, 5, 3), dims=(0,)) for d in INTEGERS]
        cases.append(case(op, "integer", *calls, *_shapes("i32")))
    # An f16 sum that overflows or stalls unless it is accumulated in f32.
    stall = [call(np.full((3000,), 1, named(d).numpy), dims=(0,)) for d in ("f16", "bf16")]
    cases.append(case("reduce_sum", "accumulates", *stall, tolerance="rounded"))
    for op in ("reduce_max", "reduce_min"):
        calls = [call(ties(d, 7, 5), dims=(1,)) for d in (*FLOATS, "f8e5m2")]
        calls += [call(ties(d, 7, 5, nan=False), dims=(0,)) for d in FLOATS]
        cases.append(case(op, "float", *calls, *_shapes("f32"), *_shapes("bf16")))
        calls = [call(ties(d, 5, 3), dims=(0,)) for d in INTEGERS]
        calls += [call(random(d, 0, 3), dims=(0,)) for d in INTEGERS]
        cases.append(case(op, "integer", *calls, *_shapes("i32")))
    for op in ("reduce_and", "reduce_or"):
        cases.append(case(op, "bool", *_shapes("bool")))
    for op in ("argmax", "argmin"):
        calls = [call(ties(d, 6, 7), dim=1, dtype=named("i32")) for d in (*FLOATS, *INTEGERS)]
        calls += [call(ties("f32", 6, 7, nan=False), dim=0, dtype=named("i64"))]
        calls += [call(np.zeros((2, 5), "f4"), dim=1, dtype=named("i64"))]
        calls += [call(random("f32", 0, 3), dim=1, dtype=named("i32"))]
        cases.append(case(op, "all", *calls))
    return cases


def _cumulative() -> list[OpCase]:
    cases = []
    for reverse in (False, True):
        way = "reverse" if reverse else "forward"
        for op in ("cumsum", "cumprod", "cumlogsumexp"):
            calls = [call(random(d, 3, 5), dim=1, reverse=reverse) for d in FLOATS]
            calls += [call(random("f32", 3, 5), dim=0, reverse=reverse)]
            calls += [call(random("f32", 0, 2), dim=0, reverse=reverse)]
            cases.append(case(op, f"float-{way}", *calls, tolerance="summed"))
        for op in ("cumsum", "cumprod"):
            calls = [call(ties(d, 5, 3), dim=0, reverse=reverse) for d in INTEGERS]
            cases.append(case(op, f"integer-{way}", *calls))
        for op in ("cummax", "cummin"):
            calls = [call(ties(d, 6, 4), dim=0, reverse=reverse) for d in (*FLOATS, *INTEGERS)]
            calls += [call(random("f32", 0, 2), dim=0, reverse=reverse)]
            cases.append(case(op, f"all-{way}", *calls))
    return cases


def _windows() -> list[OpCase]:
    cases = []
    for kind in ("sum", "max", "min"):
        calls = [call(random("f32", 4, 5), kind=kind, **w) for w in WINDOWS]
        calls += [call(random(d, 4, 5), kind=kind, **WINDOWS[1]) for d in ("f64", "bf16", "i32")]
        calls += [call(random("f32"), kind=kind, **{k: () for k in WINDOWS[0]})]
        pool = dict(
            window=(1, 1, 3, 3),
            strides=(1, 1, 2, 2),
            padding=((0, 0), (0, 0), (1, 1), (1, 1)),
            base_dilation=(1, 1, 1, 1),
            window_dilation=(1, 1, 1, 1),
        )
        calls += [call(random("f32", 2, 3, 6, 5), kind=kind, **pool)]
        cases.append(case("reduce_window", kind, *calls, tolerance="summed"))
    calls = []
    for x, window, strides, padding, out in (
        (random("f32", 4, 5), (2, 2), (2, 1), ((0, 0), (0, 1)), (2, 5)),
        (random("f32", 7), (3,), (1,), ((1, 1),), (7,)),
        (np.zeros((6,), "f4"), (3,), (2,), ((0, 1),), (3,)),  # ties: the first of each window
        (random("f64", 2, 3, 4, 4), (1, 1, 2, 2), (1, 1, 2, 2), ((0, 0),) * 4, (2, 3, 2, 2)),
        (random("bf16", 6), (2,), (2,), ((0, 0),), (3,)),
    ):
        source = random("f64", *out, seed=3).astype(x.dtype)
        calls.append(call(source, x, window=window, strides=strides, padding=padding))
    cases.append(case("select_and_scatter_add", "all", *calls, tolerance="summed"))
    return cases


def _sorts() -> list[OpCase]:
    calls = [call(ties(d, 6, 4), dim=0, num_keys=1) for d in (*FLOATS, *INTEGERS, "bool")]
    rows = np.arange(24, dtype=np.int32).reshape(3, 8)
    calls += [
        call(ties("f32", 3, 8), rows, dim=1, num_keys=1),
        call(ties("i32", 3, 8), ties("f32", 3, 8, seed=1), rows, dim=1, num_keys=2),
        call(ties("u32", 3, 8), rows, random("bf16", 3, 8), dim=1, num_keys=1),
        call(random("f32", 0, 2), dim=0, num_keys=1),
        call(random("f32", 2, 1), dim=1, num_keys=1),
    ]
    tops = [call(ties(d, 5, 7), k=3) for d in (*FLOATS, *INTEGERS)]
    tops += [
        call(ties("f32", 7), k=7),
        call(random("f32", 3, 4), k=0),
        call(random("f32", 0, 4), k=2),
        call(np.zeros((2, 6), "f4"), k=4),
    ]
    return [case("sort", "all", *calls), case("top_k", "all", *tops)]


CASES = [*_reductions(), *_cumulative(), *_windows(), *_sorts()]
