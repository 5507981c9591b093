"""The products that a backward computes again from forward values, as a checkpointed region asks."""

from collections.abc import Collection, Iterable

from plait.core_ir.graph import Eqn, Value
from plait.core_ir.ops import convolution, linalg
from plait.core_ir.ops.attention import attention
from plait.core_ir.passes.equations import nested_graphs

PRODUCTS = frozenset({*linalg.FAMILY, *convolution.FAMILY, attention})


def dependents(eqns: Iterable[Eqn], values: Iterable[Value]) -> set[Value]:
    """The values, and all that equations make of them."""
    found = set(values)
    for eqn in eqns:
        if any(o in found for o in eqn.operands):
            found.update(eqn.results)
    return found


def recomputed_products(eqns: Iterable[Eqn], gradients: Collection[Value]) -> set[Eqn]:
    """The products, and control flow that holds some, that are made of none of `gradients`."""
    return {eqn for eqn in eqns if is_product(eqn) and not any(r in gradients for r in eqn.results)}


def is_product(eqn: Eqn) -> bool:
    """Whether an equation is a product, or control flow that holds one."""
    if eqn.op in PRODUCTS:
        return True
    return any(is_product(inner) for graph in nested_graphs(eqn) for inner in graph.eqns)
