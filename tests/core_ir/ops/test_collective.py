"""Collectives: type rules by constraint, meanings over hand-computed arrays, costs."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from plait.core_ir.errors import ExecutionError, TypeRuleError
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.core_ir.ops.elementwise import neg
from plait.core_ir.types import AsyncType, TensorType, f32, type_of

OVER = {"axis": "data", "size": 2}
Refuses = Callable[..., None]
Accepts = Callable[..., list[TensorType]]


def together(op: Op, *arrays: Any, **attrs: Any) -> list[Any]:
    """The result of each rank of a group, of the type that the rule says; no operand is changed."""
    ranks = [np.asarray(x) for x in arrays]
    attrs = {"axis": "data", "size": len(ranks), **attrs}
    kept = [x.tobytes() for x in ranks]
    assert op.evaluate_ranks is not None
    results = [result for (result,) in op.evaluate_ranks([(x,) for x in ranks], attrs)]
    (started,) = op.types([type_of(ranks[0])], attrs)
    assert [AsyncType(type_of(r)) for r in results] == [started] * len(ranks)
    assert [x.tobytes() for x in ranks] == kept
    return results


def lists(arrays: Sequence[Any]) -> list[Any]:
    return [x.tolist() for x in arrays]


# Meanings.


def test_all_gather_concatenates_in_the_order_of_ranks() -> None:
    a, b = [[1, 2]], [[3, 4]]
    assert lists(together(ops.all_gather, a, b, dim=0)) == [[[1, 2], [3, 4]]] * 2
    assert lists(together(ops.all_gather, a, b, dim=1)) == [[[1, 2, 3, 4]]] * 2


def test_reduce_scatter_gives_each_rank_its_part_of_the_reduction() -> None:
    a, b = [[1, 2], [3, 4]], [[10, 0], [-30, 40]]
    assert lists(together(ops.reduce_scatter, a, b, dim=0, reduction="sum")) == [
        [[11, 2]],
        [[-27, 44]],
    ]
    assert lists(together(ops.reduce_scatter, a, b, dim=1, reduction="max")) == [
        [[10], [3]],
        [[2], [40]],
    ]


def test_all_reduce_by_each_reduction() -> None:
    a, b, c = [1, -2, 7], [4, 5, 6], [2, 2, 2]
    for reduction, expected in {
        "sum": [7, 5, 15],
        "product": [8, -20, 84],
        "max": [4, 5, 7],
        "min": [1, -2, 2],
    }.items():
        assert lists(together(ops.all_reduce, a, b, c, reduction=reduction)) == [expected] * 3


def test_all_reduce_adds_in_the_order_of_ranks() -> None:
    numbers = [np.float32(x) for x in (1e8, -1e8, 1)]
    assert lists(together(ops.all_reduce, *numbers, reduction="sum")) == [1.0] * 3
    assert lists(together(ops.all_reduce, *numbers[::-1], reduction="sum")) == [0.0] * 3


def test_all_reduce_of_narrow_floats_rounds_once() -> None:
    numbers = [np.array(x, ml_dtypes.bfloat16) for x in (256, 1, 1, 1)]  # in bf16, 256 + 1 is 256
    assert [float(x) for x in together(ops.all_reduce, *numbers, reduction="sum")] == [260.0] * 4


def test_all_reduce_of_bool_is_or_and_and() -> None:
    a, b = [True, True, False], [True, False, False]
    assert lists(together(ops.all_reduce, a, b, reduction="max")) == [[True, True, False]] * 2
    assert lists(together(ops.all_reduce, a, b, reduction="min")) == [[True, False, False]] * 2


def test_all_reduce_wraps_integers_and_keeps_nan() -> None:
    a = np.array([100, -100], np.int8)
    assert lists(together(ops.all_reduce, a, a, reduction="sum")) == [[-56, 56]] * 2
    x = np.array([np.nan, 1], np.float32)
    y = np.array([1, np.nan], np.float32)
    for reduction in ("max", "min"):
        assert all(np.isnan(r).all() for r in together(ops.all_reduce, x, y, reduction=reduction))


def test_all_to_all_is_a_transpose_of_parts() -> None:
    a, b = [[1, 2, 3, 4]], [[5, 6, 7, 8]]
    assert lists(together(ops.all_to_all, a, b, split_dim=1, concat_dim=0)) == [
        [[1, 2], [5, 6]],
        [[3, 4], [7, 8]],
    ]
    assert lists(together(ops.all_to_all, a, b, split_dim=1, concat_dim=1)) == [
        [[1, 2, 5, 6]],
        [[3, 4, 7, 8]],
    ]


def test_permute_gives_zeros_to_a_rank_that_nobody_sends_to() -> None:
    x = [[1, 2], [3, 4], [5, 6]]
    assert lists(together(ops.permute, *x, pairs=((0, 1), (1, 2)))) == [[0, 0], [1, 2], [3, 4]]
    assert lists(together(ops.permute, *x, pairs=((0, 2), (2, 0), (1, 1)))) == [
        [5, 6],
        [3, 4],
        [1, 2],
    ]
    assert lists(together(ops.permute, *x, pairs=())) == [[0, 0]] * 3


def test_axis_index_counts_the_ranks() -> None:
    assert ops.axis_index.evaluate_ranks is not None
    ranks = ops.axis_index.evaluate_ranks([()] * 3, {"axis": "data", "size": 3})
    assert [(int(x), x.dtype) for (x,) in ranks] == [(i, np.dtype("int32")) for i in range(3)]


def test_a_group_of_one_needs_no_other_rank(evaluate: Callable[..., Any]) -> None:
    one = {"axis": "data", "size": 1}
    x = np.array([[1.0, 2]], np.float32)
    results = [
        ops.all_gather.evaluate([x], {**one, "dim": 0}, _never),
        ops.reduce_scatter.evaluate([x], {**one, "dim": 1, "reduction": "product"}, _never),
        ops.all_reduce.evaluate([x], {**one, "reduction": "min"}, _never),
        ops.all_to_all.evaluate([x], {**one, "split_dim": 1, "concat_dim": 0}, _never),
        ops.permute.evaluate([x], {**one, "pairs": ((0, 0),)}, _never),
    ]
    assert [r[0].tolist() for r in results] == [x.tolist()] * 5
    assert ops.permute.evaluate([x], {**one, "pairs": ()}, _never)[0].tolist() == [[0, 0]]
    assert evaluate(ops.axis_index, **one)[0] == 0


def _never(graph: Any, operands: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize("op", [*ops.STARTS, ops.axis_index], ids=str)
def test_one_rank_of_more_is_refused_and_pointed_to_interpret_ranks(op: Op) -> None:
    with pytest.raises(ExecutionError, match=rf"{op} over axis 'data'.*2 ranks.*interpret_ranks"):
        op.evaluate([], OVER, _never)


# Constraints.


def test_types_of_results(accepts: Accepts) -> None:
    gathered = accepts(ops.all_gather, "f32[4, 6]", **OVER, dim=1)
    assert gathered == [AsyncType(TensorType(f32, (4, 12)))]
    assert str(gathered) == "[async<f32[4, 12]>]"
    assert str(accepts(ops.reduce_scatter, "f32[4, 6]", **OVER, dim=1, reduction="sum")) == (
        "[async<f32[4, 3]>]"
    )
    assert str(accepts(ops.all_reduce, "i8[]", **OVER, reduction="max")) == "[async<i8[]>]"
    assert str(accepts(ops.all_to_all, "f32[4, 6]", **OVER, split_dim=0, concat_dim=1)) == (
        "[async<f32[2, 12]>]"
    )
    assert str(accepts(ops.permute, "bool[4]", **OVER, pairs=((0, 1),))) == "[async<bool[4]>]"
    assert str(accepts(ops.wait, "async<f32[4]>")) == "[f32[4]]"
    assert str(accepts(ops.axis_index, **OVER)) == "[i32[]]"


def test_the_bytes_of_what_is_under_way_are_those_to_come() -> None:
    started = AsyncType(TensorType(f32, (4, 6)))
    assert (started.num_bytes, started.dtype, started.shape) == (96, f32, (4, 6))
    assert started != TensorType(f32, (4, 6))
    assert started == AsyncType(started.type)
    with pytest.raises(TypeError, match="needs a tensor type"):
        AsyncType(started)


def test_all_gather_constraints(refuses: Refuses) -> None:
    refuses(ops.all_gather, 1, "f32[4]", axis="data", size=0, dim=0)
    refuses(ops.all_gather, 2, "f32[4]", **OVER, dim=1)
    refuses(ops.all_gather, 2, "f32[]", **OVER, dim=0)


def test_reduce_scatter_constraints(refuses: Refuses) -> None:
    refuses(ops.reduce_scatter, 1, "f32[4]", axis="data", size=0, dim=0, reduction="sum")
    refuses(ops.reduce_scatter, 2, "f32[4]", **OVER, dim=-1, reduction="sum")
    refuses(ops.reduce_scatter, 3, "f32[3]", **OVER, dim=0, reduction="sum")
    refuses(ops.reduce_scatter, 4, "bool[4]", **OVER, dim=0, reduction="sum")


def test_all_reduce_constraints(refuses: Refuses) -> None:
    refuses(ops.all_reduce, 1, "f32[4]", axis="data", size=-1, reduction="sum")
    refuses(ops.all_reduce, 2, "bool[4]", **OVER, reduction="product")
    refuses(ops.all_reduce, 2, "c64[4]", **OVER, reduction="max")


def test_all_to_all_constraints(refuses: Refuses) -> None:
    refuses(ops.all_to_all, 1, "f32[4]", axis="data", size=0, split_dim=0, concat_dim=0)
    refuses(ops.all_to_all, 2, "f32[4]", **OVER, split_dim=1, concat_dim=0)
    refuses(ops.all_to_all, 2, "f32[4]", **OVER, split_dim=0, concat_dim=1)
    refuses(ops.all_to_all, 3, "f32[3, 4]", **OVER, split_dim=0, concat_dim=1)


def test_permute_constraints(refuses: Refuses) -> None:
    refuses(ops.permute, 1, "f32[4]", axis="data", size=0, pairs=())
    refuses(ops.permute, 2, "f32[4]", **OVER, pairs=((0, 2),))
    refuses(ops.permute, 2, "f32[4]", **OVER, pairs=((0, 1, 1),))
    refuses(ops.permute, 3, "f32[4]", **OVER, pairs=((0, 1), (1, 1)))
    refuses(ops.permute, 3, "f32[4]", **OVER, pairs=((0, 1), (0, 0)))


def test_wait_and_axis_index_constraints(refuses: Refuses) -> None:
    refuses(ops.wait, 1, "f32[4]")
    refuses(ops.axis_index, 1, axis="data", size=0)


def test_attributes_name_an_axis_and_a_known_reduction(accepts: Accepts) -> None:
    with pytest.raises(TypeRuleError, match="axis must be the name of a mesh axis"):
        accepts(ops.axis_index, axis="", size=1)
    with pytest.raises(TypeRuleError, match="reduction must be one of sum, product, max, min"):
        accepts(ops.all_reduce, "f32[4]", **OVER, reduction="avg")


def test_no_op_but_wait_takes_what_is_under_way(accepts: Accepts) -> None:
    for op, attrs in ((neg, {}), (ops.all_reduce, {**OVER, "reduction": "sum"})):
        with pytest.raises(TypeRuleError, match=r"operand 0 is async<f32\[4\]>: wait for it"):
            accepts(op, "async<f32[4]>", **attrs)


def test_flops_are_the_additions_of_one_rank() -> None:
    x = TensorType(f32, (4, 6))
    assert ops.all_reduce.flops([x], {**OVER, "reduction": "sum"}, []) == 12
    assert ops.reduce_scatter.flops([x], {**OVER, "reduction": "sum", "dim": 0}, []) == 12
    assert ops.all_gather.flops([x], {**OVER, "dim": 0}, []) == 0
