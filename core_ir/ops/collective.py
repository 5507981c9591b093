"""Collectives: what the ranks along one axis of the device mesh do together.

Types are those of one rank, and meshes stand in no type: an equation names its axis and says how many ranks are along
it. Ranks that differ in their place along the axis alone are a *group*; every rank of a group runs the same equations
in the same order. A collective is started by one equation, which gives `async<T>`, and ends with one `wait`.
"""

from collections.abc import Sequence

import numpy as np

from plait.core_ir.errors import ExecutionError
from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Checks,
    EvaluateRanksRule,
    EvaluateRule,
    InferRule,
    Op,
    Run,
    Types,
    choice_attr,
    free,
    int_attr,
    pairs_attr,
)
from plait.core_ir.ops.reduce import widened
from plait.core_ir.types import AsyncType, DType, TensorType, i32

AXIS = Attr("axis", lambda v: isinstance(v, str) and v != "", "the name of a mesh axis")
REDUCTIONS = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}
REDUCTION = choice_attr("reduction", *REDUCTIONS)

_SIZE = "size, the number of ranks along axis, is at least 1"
_DIVIDES = "the size of {} is a multiple of size"
_REDUCES = "sum and product take numbers; max and min take real numbers, or bool (or, and)"


def group_name(axis: str) -> str:
    """The name of the process group along an axis: the same on every rank, each knows its own group by it."""
    return f"plait:{axis}"


def _reduces(dtype: DType, reduction: str) -> bool:
    return dtype.kind != ("bool" if reduction in ("sum", "product") else "complex")


def _reduced(arrays: Sequence[Array], reduction: str) -> Array:
    """The reduction in the order of ranks; of 8- and 16-bit floats in f32, rounded once."""
    total = widened(arrays[0])
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total = np.asarray(REDUCTIONS[reduction](total, widened(array)))
    return total.astype(arrays[0].dtype)


def _of_one(name: str, evaluate_ranks: EvaluateRanksRule) -> EvaluateRule:
    """The meaning for a group of one rank."""

    def evaluate(operands: Sequence[Array], attrs: Attrs, _: Run) -> Sequence[Array]:
        if attrs["size"] != 1:
            raise ExecutionError(
                f"{name} over axis {attrs['axis']!r} has no meaning for one of its {attrs['size']} ranks alone; run "
                "all of them with interpret_ranks"
            )
        (results,) = evaluate_ranks([operands], attrs)
        return results

    return evaluate


def _started(
    check: Checks,
    infer: InferRule,
    evaluate_ranks: EvaluateRanksRule,
    attrs: tuple[Attr, ...],
    doc: str,
    reduces: bool = False,
) -> Op:
    """A collective of one operand; C1 of each is about size."""

    def infer_async(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        check(1, attrs["size"] >= 1, attrs["size"])
        (type_,) = infer(types, attrs)
        return (AsyncType(type_),)

    def flops(types: Types, attrs: Attrs, _: Types) -> int:
        return types[0].size * (attrs["size"] - 1) // attrs["size"] if reduces else 0

    return Op(
        check.name,
        infer_async,
        _of_one(check.name, evaluate_ranks),
        1,
        (AXIS, int_attr("size"), *attrs),
        check.constraints,
        flops,
        movement=not reduces,
        effect=True,
        evaluate_ranks=evaluate_ranks,
        doc=doc,
    )


def _resized(x: TensorType, dim: int, size: int) -> TensorType:
    return x.with_shape(size if d == dim else n for d, n in enumerate(x.shape))


# all_gather

_all_gather = Checks("all_gather", _SIZE, "0 <= dim < rank of the operand")


def _all_gather_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), dim = types, attrs["dim"]
    _all_gather(2, 0 <= dim < x.rank, f"dim {dim} of {x}")
    return (_resized(x, dim, x.shape[dim] * attrs["size"]),)


def _all_gather_evaluate(ranks: Sequence[Sequence[Array]], attrs: Attrs) -> list[list[Array]]:
    whole = np.concatenate([x for (x,) in ranks], attrs["dim"])
    return [[whole] for _ in ranks]


all_gather = _started(
    _all_gather,
    _all_gather_infer,
    _all_gather_evaluate,
    (int_attr("dim"),),
    "x -> the operands of all ranks, concatenated along `dim` in the order of ranks.",
)


# reduce_scatter

_reduce_scatter = Checks(
    *("reduce_scatter", _SIZE, "0 <= dim < rank of the operand", _DIVIDES.format("dim"), _REDUCES)
)


def _reduce_scatter_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), dim, size = types, attrs["dim"], attrs["size"]
    _reduce_scatter(2, 0 <= dim < x.rank, f"dim {dim} of {x}")
    _reduce_scatter(3, x.shape[dim] % size == 0, f"{x} by {size} along dim {dim}")
    _reduce_scatter(4, _reduces(x.dtype, attrs["reduction"]), attrs["reduction"], x)
    return (_resized(x, dim, x.shape[dim] // size),)


def _reduce_scatter_evaluate(ranks: Sequence[Sequence[Array]], attrs: Attrs) -> list[list[Array]]:
    whole = _reduced([x for (x,) in ranks], attrs["reduction"])
    return [[part] for part in np.split(whole, len(ranks), attrs["dim"])]


reduce_scatter = _started(
    _reduce_scatter,
    _reduce_scatter_infer,
    _reduce_scatter_evaluate,
    (int_attr("dim"), REDUCTION),
    "x -> this rank's part, along `dim`, of the reduction of x over the ranks (as of all_reduce).",
    reduces=True,
)


# all_reduce

_all_reduce = Checks("all_reduce", _SIZE, _REDUCES)


def _all_reduce_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    _all_reduce(2, _reduces(types[0].dtype, attrs["reduction"]), attrs["reduction"], types[0])
    return (types[0],)


def _all_reduce_evaluate(ranks: Sequence[Sequence[Array]], attrs: Attrs) -> list[list[Array]]:
    whole = _reduced([x for (x,) in ranks], attrs["reduction"])
    return [[whole] for _ in ranks]


all_reduce = _started(
    _all_reduce,
    _all_reduce_infer,
    _all_reduce_evaluate,
    (REDUCTION,),
    "x -> the reduction of x over the ranks, in their order; integers wrap, NaN wins. A backend may "
    "add floats in another order, and round 16-bit ones in between.",
    reduces=True,
)


# all_to_all

_all_to_all = Checks(
    "all_to_all",
    _SIZE,
    "split_dim and concat_dim are dims of the operand",
    _DIVIDES.format("split_dim"),
)


def _all_to_all_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,), size = types, attrs["size"]
    split, concat = attrs["split_dim"], attrs["concat_dim"]
    _all_to_all(2, 0 <= split < x.rank and 0 <= concat < x.rank, split, concat, x)
    _all_to_all(3, x.shape[split] % size == 0, f"{x} by {size} along dim {split}")
    part = _resized(x, split, x.shape[split] // size)
    return (_resized(part, concat, part.shape[concat] * size),)


def _all_to_all_evaluate(ranks: Sequence[Sequence[Array]], attrs: Attrs) -> list[list[Array]]:
    parts = [np.split(x, len(ranks), attrs["split_dim"]) for (x,) in ranks]
    return [[np.concatenate(got, attrs["concat_dim"])] for got in zip(*parts, strict=True)]


all_to_all = _started(
    _all_to_all,
    _all_to_all_infer,
    _all_to_all_evaluate,
    (int_attr("split_dim"), int_attr("concat_dim")),
    "x -> part i of x along `split_dim` goes to rank i; what a rank gets is concatenated along "
    "`concat_dim` in the order of ranks.",
)


# permute

_permute = Checks(
    "permute",
    _SIZE,
    "pairs are (source, target), both ranks along axis",
    "no rank is the source of two pairs, and none is the target of two",
)


def _permute_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    pairs, size = attrs["pairs"], attrs["size"]
    _permute(2, all(len(p) == 2 and 0 <= min(p) and max(p) < size for p in pairs), pairs, size)
    distinct = [len({p[side] for p in pairs}) for side in (0, 1)]
    _permute(3, distinct == [len(pairs), len(pairs)], pairs)
    return (types[0],)


def _permute_evaluate(ranks: Sequence[Sequence[Array]], attrs: Attrs) -> list[list[Array]]:
    sources = {target: source for source, target in attrs["pairs"]}
    return [
        [ranks[sources[rank]][0] if rank in sources else np.zeros_like(x)]
        for rank, (x,) in enumerate(ranks)
    ]


permute = _started(
    _permute,
    _permute_infer,
    _permute_evaluate,
    (pairs_attr("pairs"),),
    "x -> x of rank `source` on rank `target`, for each of `pairs`; zeros on a rank that is no target.",
)


# wait, axis_index


def _wait_infer(types: Types, _: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    wait.require(1, isinstance(x, AsyncType), x)
    return (TensorType(x.dtype, x.shape),)


wait = Op(
    "wait",
    _wait_infer,
    lambda operands, attrs, run: tuple(operands),
    1,
    (),
    ("the operand is async",),
    free,
    movement=True,
    effect=True,
    takes_async=True,
    doc="async<T> -> T, once the collective that gives it has ended.",
)


def _axis_index_infer(_: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    axis_index.require(1, attrs["size"] >= 1, attrs["size"])
    return (TensorType(i32, ()),)


def _axis_index_evaluate(ranks: Sequence[Sequence[Array]], _: Attrs) -> list[list[Array]]:
    return [[np.array(rank, np.int32)] for rank in range(len(ranks))]


axis_index = Op(
    "axis_index",
    _axis_index_infer,
    _of_one("axis_index", _axis_index_evaluate),
    0,
    (AXIS, int_attr("size")),
    (_SIZE,),
    free,
    evaluate_ranks=_axis_index_evaluate,
    doc="-> the place of this rank along `axis`, i32[]. Pure, and no collective.",
)

STARTS: tuple[Op, ...] = (all_gather, reduce_scatter, all_reduce, all_to_all, permute)
FAMILY: tuple[Op, ...] = (*STARTS, wait, axis_index)
