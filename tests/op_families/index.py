"""Cases of gather and scatter."""

import numpy as np
from op_families.case import OpCase, call, case, named, random

from plait.core_ir.op import Literal

ROWS = dict(
    offset_dims=(1,),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    operand_batching_dims=(),
    start_indices_batching_dims=(),
)
WINDOWS = dict(
    offset_dims=(1, 2),
    collapsed_slice_dims=(),
    start_index_map=(1, 0),
    operand_batching_dims=(),
    start_indices_batching_dims=(),
)
BATCHED = dict(
    offset_dims=(1,),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)
POINTS = dict(
    offset_dims=(),
    collapsed_slice_dims=(0, 1),
    start_index_map=(0, 1),
    operand_batching_dims=(),
    start_indices_batching_dims=(),
)


def _indices(dtype: str, *numbers: object) -> np.ndarray:
    return np.array(numbers, named(dtype).numpy)


def _gathers() -> list[OpCase]:
    calls = []
    for mode in ("clip", "fill"):
        for dtype in ("f32", "bf16", "i32", "bool", "u32"):
            x = random(dtype, 5, 3)
            fill = {} if mode == "clip" else {"fill_value": Literal(np.ones((), x.dtype))}
            how = dict(mode=mode, **fill)
            rows = _indices("i32", [0], [4], [-1], [5], [2], [2])
            calls.append(call(x, rows, slice_sizes=(1, 3), **ROWS, **how))
        fill = {} if mode == "clip" else {"fill_value": Literal(np.float32(np.nan))}
        how = dict(mode=mode, **fill)
        x = random("f32", 5, 3)
        for far in (
            _indices("i64", [2**40], [-(2**40)], [2**32 + 1], [2**31]),
            _indices("u32", [2**31 + 1], [2**32 - 1], [2], [0]),
        ):  # beyond the range of i32: not to be wrapped into it
            calls.append(call(x, far, slice_sizes=(1, 3), **ROWS, **how))
        corners = _indices("i64", [0, 0], [1, 3], [2, 4], [-1, 1], [1, 9])
        calls += [
            call(x, corners, slice_sizes=(2, 2), **WINDOWS, **how),
            call(
                x,
                _indices("i32", [0, 1], [4, 2], [5, 0], [0, -1]),
                slice_sizes=(1, 1),
                **POINTS,
                **how,
            ),
            call(
                random("f32", 2, 6, 3),
                _indices("i32", [[1], [7], [0]], [[5], [5], [-2]]),
                slice_sizes=(1, 1, 3),
                **{**BATCHED, "offset_dims": (2,)},
                **how,
            ),
            call(
                random("f32", 2, 6),
                _indices("i32", [[1], [7], [0]], [[5], [5], [-2]]),
                slice_sizes=(1, 1),
                **{**BATCHED, "offset_dims": ()},
                **how,
            ),
            call(x, np.zeros((0, 1), np.int32), slice_sizes=(1, 3), **ROWS, **how),
            call(
                x,
                _indices("i32", [[1], [9]], [[0], [3]]),
                slice_sizes=(1, 3),
                **{**ROWS, "offset_dims": (2,)},
                **how,
            ),
            call(x, _indices("i32", 3), slice_sizes=(1, 3), **{**ROWS, "offset_dims": (0,)}, **how),
            call(
                random("f32", 4, 2, 3),
                _indices("u32", [1], [2], [8]),
                slice_sizes=(4, 1, 2),
                **{
                    **ROWS,
                    "offset_dims": (0, 1),
                    "collapsed_slice_dims": (1,),
                    "start_index_map": (1,),
                },
                **how,
            ),
        ]
    return [case("gather", "all", *calls)]


SET_ROWS = dict(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
    operand_batching_dims=(),
    scatter_indices_batching_dims=(),
)
SET_WINDOWS = dict(
    update_window_dims=(1, 2),
    inserted_window_dims=(),
    scatter_dims_to_operand_dims=(1, 0),
    operand_batching_dims=(),
    scatter_indices_batching_dims=(),
)
SET_BATCHED = dict(
    update_window_dims=(),
    inserted_window_dims=(1,),
    scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)


def _scatters() -> list[OpCase]:
    cases = []
    rows = _indices("i32", [0], [4], [-1], [5], [2], [2], [4])
    corners = _indices("i64", [0, 0], [1, 3], [2, 4], [-1, 1], [0, 0])
    for kind in ("set", "add", "mul", "min", "max"):
        calls = []
        for mode in ("drop", "clip"):
            how = dict(kind=kind, mode=mode)
            for dtype in ("f32", "f64", "i32", "i64", "u8"):
                x, updates = random(dtype, 5, 3), random(dtype, 7, 3, seed=1)
                calls.append(call(x, rows, updates, **SET_ROWS, **how))
            x = random("f32", 5, 3)
            far = _indices("i64", [2**40], [-(2**40)], [2**32 + 1], [2])
            calls.append(call(x, far, random("f32", 4, 3, seed=1), **SET_ROWS, **how))
            batched = random("f32", 2, 6)
            points = _indices("i32", [[1], [7], [0]], [[5], [5], [-2]])
            calls += [
                call(x, corners, random("f32", 5, 2, 2, seed=1), **SET_WINDOWS, **how),
                call(batched, points, random("f32", 2, 3, seed=1), **SET_BATCHED, **how),
                call(x, np.zeros((0, 1), np.int32), random("f32", 0, 3), **SET_ROWS, **how),
                call(
                    x,
                    _indices("i32", 3),
                    random("f32", 3, seed=1),
                    **{**SET_ROWS, "update_window_dims": (0,)},
                    **how,
                ),
            ]
        cases.append(case("scatter", kind, *calls, tolerance="summed"))
    nan = np.array([[np.nan, 1, 2]], "f4")
    calls = [
        call(np.zeros((2, 3), "f4"), _indices("i32", [1]), nan, kind=kind, mode="drop", **SET_ROWS)
        for kind in ("set", "add", "mul", "min", "max")
    ]
    calls += [
        call(
            random("bf16", 4, 3),
            _indices("i32", [1], [3]),
            random("bf16", 2, 3, seed=1),
            kind=kind,
            mode="drop",
            **SET_ROWS,
        )
        for kind in ("set", "add", "min")
    ]
    calls += [
        call(
            random("bool", 4, 3),
            _indices("i32", [1], [3]),
            random("bool", 2, 3, seed=1),
            kind="set",
            mode="drop",
            **SET_ROWS,
        ),
        call(
            random("u32", 4, 3),
            _indices("i32", [1], [1]),
            random("u32", 2, 3, seed=1),
            kind="add",
            mode="drop",
            **SET_ROWS,
        ),
    ]
    cases.append(case("scatter", "special", *calls))
    return cases


CASES = [*_gathers(), *_scatters()]
