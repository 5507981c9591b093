"""Compute equations whose operands are constants, where that is exact everywhere.

    %a: i32[] = constant() {value=i32[]:[2]}
    %b: i32[] = constant() {value=i32[]:[3]}      ->   %c: i32[] = constant() {value=i32[]:[6]}
    %c: i32[] = mul(%a, %b)

Integer and boolean arithmetic, movement of data, and conversions that lose nothing; results of up to 16 elements that
are not larger than the operands together. Never floating-point arithmetic: the target's own must decide.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Array, Literal
from plait.core_ir.ops import control, random
from plait.core_ir.ops.elementwise import convert
from plait.core_ir.ops.shape import constant
from plait.core_ir.passes.equations import has_effect

MAX_ELEMENTS = 16
_NEVER = frozenset({*control.FAMILY, *random.FAMILY})


def fold_constants(graph: Graph) -> Graph:
    """The graph with exact equations of constants replaced by constants; what they read may be left dead."""
    known: dict[Value, Array] = {}
    eqns: list[Eqn] = []
    for eqn in graph.eqns:
        arrays = [known[o] for o in eqn.operands if o in known]
        folded = _fold(eqn, arrays) if arrays and len(arrays) == len(eqn.operands) else None
        if eqn.op is constant:
            known[eqn.result] = eqn.attrs["value"].array
        elif folded is not None:
            known[eqn.result] = folded
            eqn = Eqn(constant, (), {"value": Literal(folded)}, eqn.results, eqn.source)
        eqns.append(eqn)
    return replace(graph, eqns=tuple(eqns))


def _fold(eqn: Eqn, arrays: Sequence[Array]) -> Array | None:
    """The result of an equation of constants, or None where it is not folded."""
    if len(eqn.results) != 1 or eqn.op in _NEVER or has_effect(eqn):
        return None
    size = eqn.result.type.size
    if size > MAX_ELEMENTS or size > sum(a.size for a in arrays):
        return None
    types = [v.type for v in (*eqn.operands, *eqn.results)]
    if not eqn.op.movement and any(t.dtype.is_inexact for t in types):
        return None
    (result,) = eqn.op.evaluate(arrays, eqn.attrs, interpret)
    result = np.asarray(result)
    if eqn.op is convert and not _is_exact(arrays[0], result):
        return None
    return result


def _is_exact(before: Array, after: Array) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.array_equal(after.astype(before.dtype), before, equal_nan=True))
