"""From a graph to lax operations: the table of emitters, one for each op, and the loop over equations."""

from collections.abc import Callable
from functools import partial

import jax

from plait.backends.jax import (
    emit_attention,
    emit_collective,
    emit_control,
    emit_elementwise,
    emit_index,
    emit_linalg,
    emit_random,
    emit_reduce,
    emit_shape,
)
from plait.backends.jax.hiding import hiding
from plait.backends.jax.private import barrier
from plait.backends.jax.rule import Table
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.ops.collective import wait
from plait.core_ir.types import dtype_of


def emit(graph: Graph, *, is_alone: bool = True) -> Callable[..., tuple[jax.Array, ...]]:
    """The graph as a function of arrays, one for each input in order; it gives the outputs in order.

    is_alone: whether all devices of the program run it at once, rather than those of one rank of the stage axis.

    The order of a graph that communicates is kept where it counts: what a `wait` gives stands behind a barrier with
    what was computed since its start (`hiding`), so that XLA cannot end the collective before what is to hide it.

    Traceable under `jit`; trace it inside `jax.enable_x64(True)`, or 64-bit types become 32-bit ones.

    Raises
    ------
    UnsupportedError: at once, where an op has no emitter; when traced, where an emitter cannot do
    its equation, or gives another type than the op's rule.
    """
    table = TABLE if is_alone else _AMONG_OTHERS
    for eqn in graph.eqns:
        if eqn.op not in table:
            raise UnsupportedError(f"{eqn.source}: the JAX backend has no emitter for {eqn.op}")

    order = hiding(graph)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        known: dict[Value, jax.Array] = dict(zip(graph.inputs, arrays, strict=True))
        for eqn in graph.eqns:
            operands = [known[v] for v in eqn.operands]
            if eqn.op is wait or eqn in order.beside:
                beside = order.before[eqn] if eqn.op is wait else (order.beside[eqn],)
                came, *passed = barrier((*operands, *(known[v] for v in beside)))
                operands = [came]
                known.update(zip(beside, passed, strict=True))
            results = table[eqn.op](eqn, operands)
            for value, result in zip(eqn.results, results, strict=True):
                if result.shape != value.type.shape or dtype_of(result.dtype) != value.type.dtype:
                    raise UnsupportedError(
                        f"{eqn.source}: the emitter of {eqn.op} gave {result.dtype}{list(result.shape)}, "
                        f"expected {value.type}"
                    )
                known[value] = result
        return tuple(known[v] for v in graph.outputs)

    return run


TABLE: Table = {
    **emit_elementwise.TABLE,
    **emit_shape.TABLE,
    **emit_reduce.TABLE,
    **emit_index.TABLE,
    **emit_linalg.TABLE,
    **emit_attention.TABLE,
    **emit_random.TABLE,
    **emit_collective.TABLE,
    **emit_control.table(emit),
}
"""The emitter of each op."""

_AMONG_OTHERS: Table = {
    **TABLE,
    **emit_collective.AMONG_OTHERS,
    **emit_control.table(partial(emit, is_alone=False)),
}
"""The same where other devices run another graph."""

NOT_EMITTED: dict[str, str] = {}
"""Ops this backend does not run, by name, with the reason."""
