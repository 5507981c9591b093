"""Bundles of unlike arrays in shared fields: what goes in comes out, and alike bundles stand leaf by leaf."""

from collections.abc import Sequence

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends.jax.spmd.layout import Layout, pack, unpack
from plait.core_ir.types import TensorType, bf16, bool_, f32, f64, i32

TYPES = st.builds(
    TensorType,
    st.sampled_from([bool_, i32, bf16, f32, f64]),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
BUNDLES = st.lists(st.lists(TYPES, max_size=5), min_size=1, max_size=4)


def arrays_of(bundle: Sequence[TensorType]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 2, t.shape).astype(t.dtype.numpy) for t in bundle]


@settings(max_examples=30, deadline=None)
@given(BUNDLES)
def test_every_bundle_comes_out_as_it_went_in(bundles: list[list[TensorType]]) -> None:
    layout = Layout.of(bundles)
    with jax.enable_x64(True), jax.disable_jit():
        for bundle in bundles:
            arrays, places = arrays_of(bundle), layout.place(bundle)
            fields = pack(layout, places, arrays)
            assert [
                TensorType(t.dtype, f.shape) for t, f in zip(layout.fields, fields, strict=True)
            ] == [*layout.fields]
            for place, type_, array in zip(places, bundle, arrays, strict=True):
                out = np.asarray(unpack(place, type_, fields))
                assert out.dtype == array.dtype
                np.testing.assert_array_equal(out, array)


@given(BUNDLES)
def test_no_field_is_longer_than_some_bundle_asks(bundles: list[list[TensorType]]) -> None:
    layout = Layout.of(bundles)
    for dtype in {t.dtype for t in layout.fields}:
        needed = max(sum(t.size for t in bundle if t.dtype == dtype) for bundle in bundles)
        assert sum(t.size for t in layout.fields if t.dtype == dtype) >= needed


def test_alike_bundles_stand_leaf_by_leaf() -> None:
    bundle = [TensorType(f32, (2, 3)), TensorType(i32, ()), TensorType(f32, (2, 3))]
    layout = Layout.of([bundle, [], bundle])
    assert layout.num_leaves == len(layout.fields) == 3
    assert sum(t.size for t in layout.fields) == 13


def test_what_unlike_bundles_share_stands_leaf_by_leaf_and_the_rest_is_packed_per_dtype() -> None:
    block = [TensorType(f32, (4, 4)), TensorType(f32, (4,))]
    table, head = TensorType(f32, (9, 4)), TensorType(f32, (4, 7))
    layout = Layout.of([[table, *block], block, [*block, head, TensorType(f64, (3,))]])
    assert layout.fields == (*block, TensorType(f32, (36,)), TensorType(f64, (3,)))
    assert layout.num_leaves == 2
