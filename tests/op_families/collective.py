"""Cases of the collectives over a group of one rank, which every backend runs without a mesh."""

from typing import Any

import numpy as np
from op_families.case import ALL, OpCase, named, random

from plait.core_ir.build import Builder
from plait.core_ir.op import Array
from plait.core_ir.ops import OPS
from plait.core_ir.types import type_of

ONE = {"axis": "data", "size": 1}
CALLS: dict[str, dict[str, Any]] = {
    "all_gather": {"dim": 1},
    "reduce_scatter": {"dim": 0, "reduction": "sum"},
    "all_reduce": {"reduction": "max"},
    "all_to_all": {"split_dim": 1, "concat_dim": 0},
    "permute": {"pairs": ((0, 0),)},
}


def started(op: str, label: str, *arrays: Array, **attrs: Any) -> OpCase:
    """A collective and its wait, over each of some arrays."""
    b = Builder(op)
    for array in arrays:
        begun = b(OPS[op], b.input(type_of(array)), **ONE, **attrs)
        b.output(b(OPS["wait"], begun))
    return OpCase(f"{op}-{label}", OPS[op], b.build(), arrays, "exact")


def _fits(op: str, dtype: str) -> bool:
    kind = named(dtype).kind
    return not (op == "reduce_scatter" and kind == "bool") and not (
        op == "all_reduce" and kind == "complex"
    )


def _wait() -> OpCase:
    plain = started("permute", "nobody", random("f32", 3), np.float32(2), pairs=())
    return OpCase("wait-permute", OPS["wait"], plain.graph, plain.inputs, "exact")


def _axis_index() -> OpCase:
    b = Builder("axis_index")
    b.output(b(OPS["axis_index"], **ONE))
    return OpCase("axis_index-one", OPS["axis_index"], b.build(), (), "exact")


CASES = [
    *(
        started(op, "one", *(random(d, 2, 3) for d in ALL if _fits(op, d)), **attrs)
        for op, attrs in CALLS.items()
    ),
    _wait(),
    _axis_index(),
]
