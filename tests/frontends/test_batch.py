"""Batches: cutting, checking, converting."""

from typing import Any

import numpy as np
import pytest
import torch

from plait.core_ir.errors import BatchError
from plait.core_ir.types import TensorType, f32, f64, i32, i64
from plait.frontends.batch import batch_spec, example_microbatch


def test_arrays_are_cut_numbers_go_whole_words_are_static() -> None:
    leaves = [
        ("x", np.arange(8.0, dtype=np.float32).reshape(4, 2)),
        ("k", 3),
        ("mode", "sum"),
        ("n", None),
    ]
    spec = batch_spec(leaves, 2, narrow=False)
    assert [(leaf.kind, leaf.type) for leaf in spec.leaves] == [
        ("cut", TensorType(f32, (2, 2))),
        ("whole", TensorType(i64, ())),
        ("static", None),
        ("static", None),
    ]
    first, second = spec.microbatches(leaves)
    np.testing.assert_array_equal(first["x"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(second["x"], [[4, 5], [6, 7]])
    assert first["k"] == second["k"] == 3
    assert example_microbatch(spec, leaves)["mode"] == "sum"


def test_slices_share_the_callers_memory() -> None:
    x = torch.arange(4.0)
    (first, _) = batch_spec([("x", x)], 2, narrow=False).microbatches([("x", x)])
    assert first["x"].data_ptr() == x.data_ptr()


def test_a_length_that_does_not_divide_names_both_numbers() -> None:
    with pytest.raises(BatchError, match=r"'x' has 5 rows.*num_microbatches=2 does not divide"):
        batch_spec([("x", np.zeros(5))], 2, narrow=False)


def test_arrays_of_other_lengths_are_named_with_both_numbers() -> None:
    leaves = [("x", np.zeros((4, 3))), ("scale", 2.0), ("y['weights']", np.zeros(3))]
    message = r"leaf 'x' has 4 rows \(dim 0\) and batch leaf .y\['weights'\]. has 3: .* as a closure .* or repeat"
    for num_microbatches in (1, 2):
        with pytest.raises(BatchError, match=message):
            batch_spec(leaves, num_microbatches, narrow=False)


def test_a_batch_without_rows() -> None:
    leaves = [("mode", "sum"), ("x", np.zeros((0, 3))), ("y", np.zeros(0))]
    with pytest.raises(BatchError, match=r"leaf 'x' has 0 rows .*at least one row each; leave"):
        batch_spec(leaves, 2, narrow=False)
    spec = batch_spec([("x", np.zeros((4, 0)))], 2, narrow=False)  # rows of no elements are rows
    assert spec.leaves[0].type == TensorType(f64, (2, 0))


def test_a_batch_that_is_one_array_is_called_the_batch() -> None:
    with pytest.raises(BatchError, match=r"^the batch has 5 rows"):
        batch_spec([("", np.zeros(5))], 2, narrow=False)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ([("x", np.zeros((6, 2), np.float32))], r"compiled for shape \[4, 2\].*got \[6, 2\]; pad"),
        (
            [("x", np.zeros((0, 2), np.float32))],
            r"compiled for shape \[4, 2\].*got \[0, 2\]; leave",
        ),
        ([("x", np.zeros((4, 2), np.int32))], "compiled for dtype f32, got i32"),
        ([("y", np.zeros((4, 2), np.float32))], r"missing \['x'\], unexpected \['y'\]"),
        ([("x", None)], "is None, but a stage that runs here reads it"),
        ([("x", object())], "is a builtins.object"),
    ],
)
def test_another_batch_than_compiled_for(later: list[tuple[str, Any]], message: str) -> None:
    spec = batch_spec([("x", np.zeros((4, 2), np.float32))], 2, narrow=False)
    with pytest.raises(BatchError, match=message):
        spec.microbatches(later)


def test_a_changed_static_value() -> None:
    spec = batch_spec([("mode", "sum"), ("x", np.zeros(2))], 2, narrow=False)
    with pytest.raises(BatchError, match="'mode' is static: compiled for 'sum', got 'mean'"):
        spec.microbatches([("mode", "mean"), ("x", np.zeros(2))])


def test_64_bit_arrays_narrow_for_jax_and_must_fit() -> None:
    spec = batch_spec([("ids", np.arange(4))], 2, narrow=True)
    assert spec.leaves[0].type == TensorType(i32, (2,))
    (first, _) = spec.microbatches([("ids", np.array([1, 2, 3, 4]))])
    assert first["ids"].dtype == np.int32
    with pytest.raises(BatchError, match="values from 1 to 4294967296 do not fit i32"):
        spec.microbatches([("ids", np.array([1, 2, 3, 2**32]))])


def test_a_leaf_that_no_stage_here_reads_may_be_none() -> None:
    spec = batch_spec([("x", np.zeros(2)), ("y", np.zeros(2))], 2, narrow=False)
    parts = spec.microbatches([("x", np.ones(2)), ("y", None)], frozenset({"x"}))
    assert [sorted(part) for part in parts] == [["x"], ["x"]]
