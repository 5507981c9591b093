"""fold_exchanges: every way to write an exchange in rows is found, and random views around one mean what they did."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph, Value
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.ops.collective import all_to_all, wait
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.fold_exchanges import fold_exchanges
from plait.core_ir.types import TensorType, f32
from plait.core_ir.verify import verify


def exchanged(b: Builder, x: Value, size: int, split_dim: int = 0, concat_dim: int = 0) -> Value:
    attrs = {"split_dim": split_dim, "concat_dim": concat_dim}
    return b(wait, b(all_to_all, x, axis="expert", size=size, **attrs))


def check(graph: Graph, size: int) -> Graph:
    """AssertionError unless the folded graph gives the same on all ranks; the graph, folded."""
    folded = verify(eliminate_dead_code(fold_exchanges(verify(graph))))
    assert folded.output_types == graph.output_types
    (type_,) = graph.input_types
    arrays = [
        np.arange(type_.size, dtype=np.float32).reshape(type_.shape) + 1000 * r for r in range(size)
    ]
    given = [[array] for array in arrays]
    results = [interpret_ranks(one, given, {"expert": size}) for one in (graph, folded)]
    for wanted, found in zip(*results, strict=True):
        for a, b in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(a, b)
    return folded


def by_rows(
    b: Builder, x: Value, size: int, split_dim: int, concat_dim: int, has_number: bool
) -> Value:
    """The exchange of dims, spelled with one of rows; has_number: with the rank's number as a dim."""
    shape = x.type.shape
    parts = b.reshape(x, _cut(shape, split_dim, size))
    rank = len(shape) + 1
    rows = b.transpose(parts, (split_dim, *(d for d in range(rank) if d != split_dim)))
    part = rows.type.shape[1:]
    if not has_number:
        rows = b.reshape(rows, (size * part[0], *part[1:]))
    rows = b.reshape(exchanged(b, rows, size), (size, *part))
    order = list(range(1, rank))
    order.insert(concat_dim, 0)
    joined = (*part[:concat_dim], size * part[concat_dim], *part[concat_dim + 1 :])
    return b.reshape(b.transpose(rows, order), joined)


def _cut(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :])


@pytest.mark.parametrize("has_number", [False, True])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("split_dim", "concat_dim"), list(product(range(3), repeat=2)))
def test_an_exchange_of_dims_spelled_with_one_of_rows(
    split_dim: int, concat_dim: int, size: int, has_number: bool
) -> None:
    b = Builder("g")
    x = b.input(TensorType(f32, (2 * size, 5 * size, 4 * size)))
    b.output(by_rows(b, x, size, split_dim, concat_dim, has_number))
    start, end = check(b.build(), size).eqns
    assert (start.op, end.op) == (all_to_all, wait)
    assert (start.attrs["split_dim"], start.attrs["concat_dim"]) == (split_dim, concat_dim)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_views_around_an_exchange(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([2, 3]))
    b = Builder("g")
    shape = [size, *data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]
    x = b.input(TensorType(f32, tuple(data.draw(st.permutations(shape)))))
    x = _viewed(data, b, x, size)
    splits = [d for d, n in enumerate(x.type.shape) if n % size == 0]
    split_dim = data.draw(st.sampled_from(splits)) if splits else None
    if split_dim is None:
        x = b.reshape(x, (x.type.size,))
        split_dim = 0
    concat_dim = data.draw(st.integers(0, x.type.rank - 1))
    y = exchanged(b, x, size, split_dim, concat_dim)
    if data.draw(st.booleans()):
        b.output(y)
    b.output(_viewed(data, b, y, size))
    graph = b.build()
    folded = check(graph, size)
    assert len(folded.eqns) <= len(graph.eqns)
    assert fold_exchanges(folded).eqns == folded.eqns


def _viewed(data: st.DataObject, b: Builder, x: Value, size: int) -> Value:
    for _ in range(data.draw(st.integers(0, 4))):
        shape = x.type.shape
        if data.draw(st.booleans()):
            x = b.transpose(x, tuple(data.draw(st.permutations(range(len(shape))))))
        elif data.draw(st.booleans()) and len(shape) > 1:
            at = data.draw(st.integers(0, len(shape) - 2))
            x = b.reshape(x, (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))
        else:
            dims = [d for d, n in enumerate(shape) if n % size == 0]
            if dims:
                x = b.reshape(x, _cut(shape, data.draw(st.sampled_from(dims)), size))
    return x
