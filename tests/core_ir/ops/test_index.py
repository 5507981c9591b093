"""gather and scatter against jax.lax."""

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.op import Literal
from plait.core_ir.ops.index import gather, scatter

GATHER: dict[str, Any] = dict(
    offset_dims=(1,),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    operand_batching_dims=(),
    start_indices_batching_dims=(),
    slice_sizes=(1, 3),
    mode="clip",
)
SCATTER: dict[str, Any] = dict(
    kind="add",
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
    operand_batching_dims=(),
    scatter_indices_batching_dims=(),
    mode="drop",
)
JAX_SCATTER = {
    "set": jax.lax.scatter,
    "add": jax.lax.scatter_add,
    "mul": jax.lax.scatter_mul,
    "min": jax.lax.scatter_min,
    "max": jax.lax.scatter_max,
}
MODES = {
    "clip": jax.lax.GatherScatterMode.CLIP,
    "fill": jax.lax.GatherScatterMode.FILL_OR_DROP,
    "drop": jax.lax.GatherScatterMode.FILL_OR_DROP,
}


def by_jax_gather(x: np.ndarray, indices: np.ndarray, attrs: dict[str, Any]) -> np.ndarray:
    names = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims")
    dims = jax.lax.GatherDimensionNumbers(
        **{name: attrs[name] for name in (*names, "start_indices_batching_dims")}
    )
    fill = attrs["fill_value"].array.item() if "fill_value" in attrs else None
    with jax.enable_x64(True):
        return np.asarray(
            jax.lax.gather(
                x, indices, dims, attrs["slice_sizes"], mode=MODES[attrs["mode"]], fill_value=fill
            )
        )


def by_jax_scatter(*arrays: np.ndarray, attrs: dict[str, Any]) -> np.ndarray:
    names = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims")
    batching = ("operand_batching_dims", "scatter_indices_batching_dims")
    dims = jax.lax.ScatterDimensionNumbers(**{n: attrs[n] for n in (*names, *batching)})
    with jax.enable_x64(True):
        x, indices, updates = map(jax.numpy.asarray, arrays)
        function = JAX_SCATTER[attrs["kind"]]
        return np.asarray(function(x, indices, updates, dims, mode=MODES[attrs["mode"]]))


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """Random dimension numbers, shape of x, window sizes, and indices, some out of range."""
    rank = draw(st.integers(1, 4))
    roles = [draw(st.sampled_from(("window", "dropped", "batching"))) for _ in range(rank)]
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    sizes = [
        draw(st.integers(0, n)) if r == "window" else 1 for r, n in zip(roles, shape, strict=True)
    ]
    x_batching = [d for d in range(rank) if roles[d] == "batching"]
    others = [d for d in range(rank) if roles[d] != "batching"]
    names = draw(st.permutations(others))[: draw(st.integers(0, len(others)))]
    free = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(0, 2)))]
    batch = draw(st.permutations([*(("b", d) for d in x_batching), *(("f", n) for n in free)]))
    batch_shape = [shape[n] if kind == "b" else n for kind, n in batch]
    indices_batching = [batch.index(("b", d)) for d in x_batching]
    window_rank = roles.count("window")
    rank_out = window_rank + len(batch)
    window_dims = sorted(draw(st.permutations(range(rank_out)))[:window_rank])
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    return dict(
        shape=tuple(shape),
        sizes=tuple(sizes),
        dropped=tuple(d for d in range(rank) if roles[d] == "dropped"),
        x_batching=tuple(x_batching),
        indices_batching=tuple(indices_batching),
        names=tuple(names),
        window_dims=tuple(window_dims),
        window=tuple(s for s, r in zip(sizes, roles, strict=True) if r == "window"),
        indices=rng.integers(-2, 6, (*batch_shape, len(names))).astype(
            draw(st.sampled_from((np.int32, np.int64, np.int8)))
        ),
        rng=rng,
    )


@given(windows(), st.sampled_from(("clip", "fill")))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_gather_equals_lax_gather(evaluate: Any, w: dict[str, Any], mode: str) -> None:
    attrs = dict(
        offset_dims=w["window_dims"],
        collapsed_slice_dims=w["dropped"],
        start_index_map=w["names"],
        operand_batching_dims=w["x_batching"],
        start_indices_batching_dims=w["indices_batching"],
        slice_sizes=w["sizes"],
        mode=mode,
    )
    if mode == "fill":
        attrs["fill_value"] = Literal(np.int32(77))
    x = w["rng"].integers(0, 50, w["shape"]).astype(np.int32)
    (got,) = evaluate(gather, x, w["indices"], **attrs)
    np.testing.assert_array_equal(got, by_jax_gather(x, w["indices"], attrs))


# XLA itself fails on a scatter whose index vectors are empty.
@given(
    windows().filter(lambda w: w["names"]),
    st.sampled_from(("drop", "clip")),
    st.sampled_from(tuple(JAX_SCATTER)),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_scatter_equals_lax_scatter(evaluate: Any, w: dict[str, Any], mode: str, kind: str) -> None:
    attrs = dict(
        kind=kind,
        update_window_dims=w["window_dims"],
        inserted_window_dims=w["dropped"],
        scatter_dims_to_operand_dims=w["names"],
        operand_batching_dims=w["x_batching"],
        scatter_indices_batching_dims=w["indices_batching"],
        mode=mode,
    )
    window, batch = iter(w["window"]), iter(w["indices"].shape[:-1])
    rank = len(w["window"]) + w["indices"].ndim - 1
    shape = [next(window) if d in w["window_dims"] else next(batch) for d in range(rank)]
    x = w["rng"].integers(1, 5, w["shape"]).astype(np.int32)
    updates = w["rng"].integers(1, 5, shape).astype(np.int32)
    (got,) = evaluate(scatter, x, w["indices"], updates, **attrs)
    np.testing.assert_array_equal(got, by_jax_scatter(x, w["indices"], updates, attrs=attrs))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, bool, np.uint8])
def test_gather_moves_any_dtype(evaluate: Any, dtype: Any) -> None:
    x = np.arange(12).reshape(4, 3).astype(dtype)
    (got,) = evaluate(gather, x, np.array([[2], [0], [2]], np.int32), **GATHER)
    np.testing.assert_array_equal(got, x[[2, 0, 2]])


def test_gather_of_a_scalar_gives_one_copy_for_each_index_vector(evaluate: Any) -> None:
    none: dict[str, Any] = dict.fromkeys(GATHER, ())
    (got,) = evaluate(gather, np.float32(3), np.zeros((2, 0), np.int32), **{**none, "mode": "clip"})
    np.testing.assert_array_equal(got, np.float32([3, 3]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["add", "mul", "min", "max"])
def test_scatter_of_floats_combines_in_their_own_dtype(
    evaluate: Any, dtype: Any, kind: str
) -> None:
    rng = np.random.default_rng(1)
    x, updates = rng.normal(size=(4, 3)).astype(dtype), rng.normal(size=(6, 3)).astype(dtype)
    updates[1, 2] = np.nan
    indices = np.array([[0], [3], [0], [0], [2], [7]], np.int32)
    attrs = {**SCATTER, "kind": kind}
    (got,) = evaluate(scatter, x, indices, updates, **attrs)
    expected = by_jax_scatter(x, indices, updates, attrs=attrs)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    assert np.isnan(got[3, 2].astype(np.float32))


def test_scatter_into_an_empty_array_leaves_it(evaluate: Any) -> None:
    for mode in ("drop", "clip"):
        (got,) = evaluate(
            scatter,
            np.zeros((0, 3), np.float32),
            np.zeros((2, 1), np.int32),
            np.ones((2, 3), np.float32),
            **{**SCATTER, "mode": mode},
        )
        assert got.shape == (0, 3)


def test_scatter_into_a_scalar_applies_every_update(evaluate: Any) -> None:
    none: dict[str, Any] = dict.fromkeys(SCATTER, ())
    attrs = {**none, "mode": "drop", "kind": "add"}
    updates = np.float32([1, 2, 4])
    (got,) = evaluate(scatter, np.float32(1), np.zeros((3, 0), np.int32), updates, **attrs)
    assert got == 8


def test_gather_c1_indices_are_integers_of_rank_1_or_more(refuses: Any) -> None:
    refuses(gather, 1, "f32[4, 3]", "f32[2, 1]", **GATHER)
    refuses(gather, 1, "f32[4, 3]", "i32[]", **GATHER)


def test_gather_c2_start_index_map_has_one_dimension_for_each_component(refuses: Any) -> None:
    refuses(gather, 2, "f32[4, 3]", "i32[2, 2]", **GATHER)
    refuses(gather, 2, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "start_index_map": (2,)})
    refuses(gather, 2, "f32[4, 3]", "i32[2, 2]", **{**GATHER, "start_index_map": (0, 0)})


def test_gather_c3_collapsed_and_batching_dims_are_apart(refuses: Any) -> None:
    refuses(gather, 3, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "collapsed_slice_dims": (1, 0)})
    refuses(gather, 3, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "collapsed_slice_dims": (2,)})
    batched = {**GATHER, "operand_batching_dims": (0,), "start_indices_batching_dims": (0,)}
    refuses(gather, 3, "f32[4, 3]", "i32[4, 1]", **batched)
    refuses(gather, 3, "f32[4, 3]", "i32[4, 1]", **{**batched, "start_index_map": (1,)})


def test_gather_c4_batching_dims_pair_up_with_equal_sizes(refuses: Any) -> None:
    attrs = {
        **GATHER,
        "operand_batching_dims": (1,),
        "start_indices_batching_dims": (0,),
        "offset_dims": (),
        "slice_sizes": (1, 1),
    }
    refuses(gather, 4, "f32[4, 3]", "i32[2, 1]", **attrs)
    refuses(gather, 4, "f32[4, 3]", "i32[3, 1]", **{**attrs, "start_indices_batching_dims": ()})
    refuses(gather, 4, "f32[4, 1]", "i32[3, 1]", **{**attrs, "start_indices_batching_dims": (1,)})


def test_gather_c5_slice_sizes_fit_x(refuses: Any) -> None:
    refuses(gather, 5, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "slice_sizes": (1, 4)})
    refuses(gather, 5, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "slice_sizes": (1,)})
    refuses(gather, 5, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "slice_sizes": (1, -1)})
    refuses(gather, 5, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "slice_sizes": (2, 3)})
    refuses(gather, 5, "f32[0, 3]", "i32[2, 1]", **GATHER)


def test_gather_c6_offset_dims_say_where_slices_go(refuses: Any, accepts: Any) -> None:
    refuses(gather, 6, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "offset_dims": (0, 1)})
    refuses(gather, 6, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "offset_dims": (2,)})
    (result,) = accepts(gather, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "offset_dims": (0,)})
    assert str(result) == "f32[3, 2]"


def test_gather_c7_fill_value_stands_with_mode_fill(refuses: Any) -> None:
    number = Literal(np.float32(0))
    refuses(gather, 7, "f32[4, 3]", "i32[2, 1]", **{**GATHER, "mode": "fill"})
    refuses(gather, 7, "f32[4, 3]", "i32[2, 1]", **GATHER, fill_value=number)
    refuses(gather, 7, "f64[4, 3]", "i32[2, 1]", **{**GATHER, "mode": "fill"}, fill_value=number)


def test_gather_c8_a_slice_out_of_range_is_moved_or_filled(evaluate: Any) -> None:
    x = np.arange(5, dtype=np.float32)
    attrs = {**GATHER, "collapsed_slice_dims": (), "slice_sizes": (2,)}
    indices = np.array([[-3], [3], [4], [2**31 - 1]], np.int32)
    (clipped,) = evaluate(gather, x, indices, **attrs)
    np.testing.assert_array_equal(clipped, np.float32([[0, 1], [3, 4], [3, 4], [3, 4]]))
    (filled,) = evaluate(
        gather, x, indices, **{**attrs, "mode": "fill"}, fill_value=Literal(np.float32(np.nan))
    )
    np.testing.assert_array_equal(filled[[0, 2, 3]], np.full((3, 2), np.nan, np.float32))
    np.testing.assert_array_equal(filled[1], [3, 4])


def test_gather_c8_holds_for_unsigned_indices_beyond_the_signed_range(evaluate: Any) -> None:
    indices = np.array([[2**64 - 1], [2**63], [1]], np.uint64)
    x = np.arange(12).reshape(4, 3)
    (got,) = evaluate(gather, x, indices, **GATHER)
    np.testing.assert_array_equal(got, x[[3, 3, 1]])
    (got,) = evaluate(gather, x, np.array([[255], [1]], np.uint8), **GATHER)
    np.testing.assert_array_equal(got, x[[3, 1]])


def test_scatter_c1_indices_are_integers_of_rank_1_or_more(refuses: Any) -> None:
    refuses(scatter, 1, "f32[4, 3]", "f32[2, 1]", "f32[2, 3]", **SCATTER)
    refuses(scatter, 1, "f32[4, 3]", "i32[]", "f32[2, 3]", **SCATTER)


def test_scatter_c2_an_index_vector_names_dimensions_of_x(refuses: Any) -> None:
    refuses(scatter, 2, "f32[4, 3]", "i32[2, 2]", "f32[2, 3]", **SCATTER)
    wrong = {**SCATTER, "scatter_dims_to_operand_dims": (2,)}
    refuses(scatter, 2, "f32[4, 3]", "i32[2, 1]", "f32[2, 3]", **wrong)


def test_scatter_c3_inserted_and_batching_dims_are_apart(refuses: Any) -> None:
    both = {**SCATTER, "operand_batching_dims": (0,), "scatter_indices_batching_dims": (0,)}
    refuses(scatter, 3, "f32[4, 3]", "i32[4, 1]", "f32[4, 3]", **both)
    wrong = {**SCATTER, "inserted_window_dims": (-1,)}
    refuses(scatter, 3, "f32[4, 3]", "i32[2, 1]", "f32[2, 3]", **wrong)


def test_scatter_c4_batching_dims_pair_up_with_equal_sizes(refuses: Any) -> None:
    attrs = {**SCATTER, "operand_batching_dims": (1,), "scatter_indices_batching_dims": (0,)}
    refuses(scatter, 4, "f32[4, 3]", "i32[2, 1]", "f32[2]", **attrs)


def test_scatter_c5_updates_have_the_dtype_of_x(refuses: Any) -> None:
    refuses(scatter, 5, "f32[4, 3]", "i32[2, 1]", "f64[2, 3]", **SCATTER)


def test_scatter_c6_kinds_have_their_dtypes(refuses: Any, accepts: Any) -> None:
    for kind, dtype in (("add", "bool"), ("mul", "bool"), ("min", "c64"), ("max", "c128")):
        attrs = {**SCATTER, "kind": kind}
        refuses(scatter, 6, f"{dtype}[4, 3]", "i32[2, 1]", f"{dtype}[2, 3]", **attrs)
        accepts(scatter, "u8[4, 3]", "i32[2, 1]", "u8[2, 3]", **attrs)


def test_scatter_c7_update_window_dims_are_those_of_the_window(refuses: Any) -> None:
    for dims in ((), (0, 1), (2,)):
        wrong = {**SCATTER, "update_window_dims": dims}
        refuses(scatter, 7, "f32[4, 3]", "i32[2, 1]", "f32[2, 3]", **wrong)


def test_scatter_c8_updates_have_the_sizes_of_window_and_batch(refuses: Any) -> None:
    refuses(scatter, 8, "f32[4, 3]", "i32[2, 1]", "f32[2, 4]", **SCATTER)
    refuses(scatter, 8, "f32[4, 3]", "i32[2, 1]", "f32[3, 3]", **SCATTER)


def test_scatter_c9_the_last_of_equal_positions_is_set(evaluate: Any) -> None:
    indices = np.array([[2], [1], [2], [1], [2]], np.int32)
    updates = np.arange(15, dtype=np.float32).reshape(5, 3)
    x = np.full((4, 3), -1, np.float32)
    (got,) = evaluate(scatter, x, indices, updates, **{**SCATTER, "kind": "set"})
    np.testing.assert_array_equal(got, [x[0], updates[3], updates[4], x[0]])


def test_scatter_c9_sums_are_rounded_one_update_at_a_time(evaluate: Any) -> None:
    # 1 is lost beside 2048 in f16, each time; summed first, the ones would count.
    updates = np.float16([[2048]] + [[1]] * 8)
    indices = np.zeros((9, 1), np.int32)
    (got,) = evaluate(scatter, np.zeros((1, 1), np.float16), indices, updates, **SCATTER)
    assert got == 2048


def test_scatter_c10_a_window_out_of_range_is_dropped_or_moved(evaluate: Any) -> None:
    x, updates = np.zeros(5, np.float32), np.float32([[1, 2], [4, 8], [16, 32]])
    attrs = {**SCATTER, "inserted_window_dims": ()}
    indices = np.array([[-1], [2], [4]], np.int32)
    (dropped,) = evaluate(scatter, x, indices, updates, **attrs)
    np.testing.assert_array_equal(dropped, [0, 0, 4, 8, 0])
    (moved,) = evaluate(scatter, x, indices, updates, **{**attrs, "mode": "clip"})
    np.testing.assert_array_equal(moved, [1, 2, 4, 8 + 16, 32])


def test_flops_count_the_combined_updates(accepts: Any) -> None:
    x, indices = [*accepts(gather, "f32[4, 3]", "i32[2, 1]", **GATHER)] * 2
    assert gather.flops([x, indices], GATHER, [x]) == 0
    assert scatter.flops([x, indices, x], SCATTER, [x]) == 6
    assert scatter.flops([x, indices, x], {**SCATTER, "kind": "set"}, [x]) == 0
