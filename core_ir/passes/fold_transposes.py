"""Fold equations that only move data into each other and into matrix products.

    %t: f32[4, 8] = transpose(%w) {permutation=[1, 0]}
    %y: f32[2, 4] = dot_general(%x, %t) {contract=[[1], [0]], ...}
                            ->  %y: f32[2, 4] = dot_general(%x, %w) {contract=[[1], [1]], ...}

Identities go; transposes, reshapes, broadcasts and lossless conversions of each other become one; what moves the
operands of `dot_general`, or exchanges the dims of its result, goes into its dims. A broadcast or a transpose that
repeats and reorders nothing is a reshape, and a broadcast has no operand dim of size 1. So equal programs of two
frontends, one in matrices and one in dims, come out equal. No arithmetic changes.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.op import Op
from plait.core_ir.ops import reduce, shape
from plait.core_ir.ops.elementwise import convert
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.passes.dot_rules import fold_dot, fold_transposed_dot
from plait.core_ir.passes.folder import Folder
from plait.core_ir.passes.view_rules import (
    fold_broadcast,
    fold_convert,
    fold_reshape,
    fold_reverse,
    fold_slice,
    fold_transpose,
)

Rule: TypeAlias = Callable[[Folder, Eqn], Value | None]


def _fold_any_transpose(folder: Folder, eqn: Eqn) -> Value | None:
    return fold_transpose(folder, eqn) or fold_transposed_dot(folder, eqn)


def _fold_pad(folder: Folder, eqn: Eqn) -> Value | None:
    amounts = (*eqn.attrs["low"], *eqn.attrs["high"], *eqn.attrs["interior"])
    return None if any(amounts) else eqn.operands[0]


def _fold_concatenate(folder: Folder, eqn: Eqn) -> Value | None:
    return eqn.operands[0] if len(eqn.operands) == 1 else None


def _fold_reduction(folder: Folder, eqn: Eqn) -> Value | None:
    """Of dims of size 1: a reshape."""
    (x,), dims = eqn.operands, eqn.attrs["dims"]
    if all(x.type.shape[d] == 1 for d in dims):
        return folder.make(shape.reshape, x, shape=eqn.result.type.shape)
    return None


_REDUCTIONS = (
    *(reduce.reduce_sum, reduce.reduce_prod, reduce.reduce_max, reduce.reduce_min),
    *(reduce.reduce_and, reduce.reduce_or),
)
RULES: Mapping[Op, Rule] = {
    shape.reshape: fold_reshape,
    shape.transpose: _fold_any_transpose,
    shape.broadcast: fold_broadcast,
    shape.slice_: fold_slice,
    shape.reverse: fold_reverse,
    shape.pad: _fold_pad,
    shape.concatenate: _fold_concatenate,
    convert: fold_convert,
    dot_general: fold_dot,
    **dict.fromkeys(_REDUCTIONS, _fold_reduction),
}


def fold_transposes(graph: Graph) -> Graph:
    """The graph with data movement folded; what was folded away may be left dead."""
    uses = Counter(o for eqn in graph.eqns for o in eqn.operands)
    uses.update(graph.outputs)
    folder = Folder(RULES, uses)
    for eqn in graph.eqns:
        folder.put(eqn)
    outputs = tuple(folder.same.get(v, v) for v in graph.outputs)
    return replace(graph, eqns=tuple(folder.eqns), outputs=outputs)
