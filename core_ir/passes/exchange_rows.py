"""Write collectives so that what travels needs no more than its type to be ended: along dim 0, rearranged around it.

    %h: async<f32[2, 8]> = all_gather(%x) {dim=1, ...}       %r: f32[1, 2, 4] = reshape(%x) ...
    %y: f32[2, 8] = wait(%h)                             ->  %h: async<f32[2, 2, 4]> = all_gather(%r) {dim=0, ...}
                                                             %w: f32[2, 2, 4] = wait(%h)
                                                             %y: f32[2, 8] = ... transpose, reshape

A task that is cut while a collective is under way hands the value on as it is. A backend that moves rows alone
would have to know in the later part how the earlier one had packed them.
"""

from collections.abc import Collection, Sequence

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops.collective import STARTS, all_gather, all_to_all, reduce_scatter, wait
from plait.core_ir.types import bf16, f16, f32, f64

_PLAIN = (f16, bf16, f32, f64)


def exchanges_rows(eqn: Eqn) -> bool:
    """Whether a collective can be written so: moves and sums of floats; others may be packed in other types."""
    (operand,) = eqn.operands
    return operand.type.dtype in _PLAIN and eqn.attrs.get("reduction", "sum") == "sum"


def is_of_rows(eqn: Eqn) -> bool:
    """Whether a collective is written so."""
    dims = (eqn.attrs.get(name, 0) for name in ("dim", "split_dim", "concat_dim"))
    return exchanges_rows(eqn) and not any(dims)


def exchange_rows(graph: Graph, values: Collection[Value]) -> Graph:
    """The graph with the collectives that give these values along dim 0. Order and outputs stay."""
    b = Builder(graph.name)
    now: dict[Value, Value] = {}
    ends: dict[Value, Eqn] = {}

    def operands(eqn: Eqn) -> Sequence[Value]:
        return [now.get(value, value) for value in eqn.operands]

    for eqn in graph.eqns:
        with b.at(eqn.source):
            if eqn.op in STARTS and eqn.result in values:
                ends[eqn.result] = eqn
                now[eqn.result] = _start(b, eqn, *operands(eqn))
            elif eqn.op is wait and eqn.operands[0] in ends:
                now[eqn.result] = _end(b, ends[eqn.operands[0]], b(wait, *operands(eqn)))
            elif now.keys().isdisjoint(eqn.operands):
                b.append(eqn)
            else:
                b.append(Eqn(eqn.op, tuple(operands(eqn)), eqn.attrs, eqn.results, eqn.source))
    return Graph(
        graph.name,
        graph.inputs,
        b.build().eqns,
        tuple(now.get(value, value) for value in graph.outputs),
        graph.input_ports,
        graph.output_ports,
    )


def _start(b: Builder, eqn: Eqn, x: Value) -> Value:
    over = {name: eqn.attrs[name] for name in ("axis", "size")}
    size, shape = int(eqn.attrs["size"]), x.type.shape
    if eqn.op is all_gather and eqn.attrs["dim"]:
        return b(all_gather, b.reshape(x, (1, *shape)), dim=0, **over)
    if eqn.op is reduce_scatter and eqn.attrs["dim"]:
        rows = b.transpose(x, _front(len(shape), eqn.attrs["dim"]))
        return b(reduce_scatter, rows, dim=0, reduction=eqn.attrs["reduction"], **over)
    if eqn.op is all_to_all and (eqn.attrs["split_dim"] or eqn.attrs["concat_dim"]):
        dim = eqn.attrs["split_dim"]
        parts = b.reshape(x, (*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]))
        rows = b.transpose(parts, _front(len(shape) + 1, dim))
        return b(all_to_all, rows, split_dim=0, concat_dim=0, **over)
    return b(eqn.op, x, **eqn.attrs)


def _end(b: Builder, start: Eqn, came: Value) -> Value:
    """What the collective gave before, of its rows."""
    if start.op is reduce_scatter:
        return b.transpose(came, _back(came.type.rank, start.attrs["dim"]))
    if start.op in (all_gather, all_to_all):
        if came.type.rank == start.result.type.rank:
            return came
        dim = start.attrs["dim" if start.op is all_gather else "concat_dim"]
        joined = b.transpose(came, _back(came.type.rank, dim))
        return b.reshape(joined, start.result.type.shape)
    return came


def _front(rank: int, dim: int) -> tuple[int, ...]:
    """The permutation that brings a dim to the front."""
    return (dim, *(d for d in range(rank) if d != dim))


def _back(rank: int, dim: int) -> tuple[int, ...]:
    """The permutation that brings the first dim to a place."""
    order = list(range(1, rank))
    order.insert(dim, 0)
    return tuple(order)
