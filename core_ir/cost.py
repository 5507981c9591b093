"""What equations cost: flops, bytes, and from them the time on some hardware."""

from collections.abc import Collection, Iterator
from functools import partial

from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.hardware import Hardware, Link
from plait.core_ir.lanes import Seconds, lanes
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.ops import attention, convolution, linalg
from plait.core_ir.ops.collective import (
    STARTS,
    all_gather,
    all_reduce,
    permute,
)
from plait.core_ir.ops.control import cond, scan, while_
from plait.core_ir.types import f32, f64

PRODUCTS = frozenset(
    {linalg.dot_general, linalg.grouped_matmul, *convolution.FAMILY, *attention.FAMILY}
)
"""The ops that run on a device's units for matrix products."""


def eqn_flops(eqn: Eqn) -> int:
    """Floating-point operations of one equation; a multiply-add is 2. Ops that hold graphs count these."""
    return eqn.op.flops([v.type for v in eqn.operands], eqn.attrs, [v.type for v in eqn.results])


def eqn_bytes(eqn: Eqn) -> int:
    """Bytes an equation reads and writes when nothing is fused."""
    return sum(v.type.num_bytes for v in (*eqn.operands, *eqn.results))


def flops(graph: Graph) -> int:
    """Floating-point operations of a graph; graphs in attributes count as their ops say."""
    return sum(map(eqn_flops, graph.eqns))


def communication_bytes(eqn: Eqn) -> int:
    """Bytes that each rank sends for a collective, at least: what a ring sends. 0 for any other equation."""
    if eqn.op not in STARTS or eqn.attrs["size"] == 1:
        return 0
    (operand,), size = eqn.operands, int(eqn.attrs["size"])
    if eqn.op is permute:
        return operand.type.num_bytes
    if eqn.op is all_gather:
        return operand.type.num_bytes * (size - 1)
    rounds = 2 if eqn.op is all_reduce else 1
    return rounds * operand.type.num_bytes * (size - 1) // size


def eqn_seconds(eqn: Eqn, hardware: Hardware = CPU_CORE, *, between: Collection[str] = ()) -> float:
    """What an equation takes on its lane: computing, or of a collective's start communicating.

    Computing: the larger of compute and of unfused traffic with memory. Products compute at `hardware.peak` of their
    operands' dtype times `product_efficiency`, all else at the peak of f32 (of f64 for 64-bit floats). Data movement is
    free, as it is fused into what reads it. Of ops that hold graphs: what the equations inside take, a scan's as often
    as it runs, a loop's once, of branches the longest.

    Communicating: latency and bytes by bandwidth of the axis' link, which lies between nodes for the axes named in
    `between` and for those of more ranks than a node has.
    """
    if eqn.op in STARTS:
        return _link(eqn, hardware, between).seconds(communication_bytes(eqn))
    if eqn.op is scan:
        return int(eqn.attrs["length"]) * seconds(eqn.attrs["body"], hardware, between=between)
    if eqn.op is cond:
        return max(seconds(branch, hardware, between=between) for branch in eqn.attrs["branches"])
    if eqn.op is while_:
        return sum(seconds(eqn.attrs[part], hardware, between=between) for part in ("cond", "body"))
    if eqn.op.movement:
        return 0.0
    return max(eqn_flops(eqn) / _rate(eqn, hardware), eqn_bytes(eqn) / hardware.bytes_per_second)


def seconds_on(hardware: Hardware, mesh: Mesh | None = None) -> Seconds:
    """`eqn_seconds` on ranks of some hardware; where they stand in a mesh, that says which axes lie between nodes."""
    between = () if mesh is None else mesh.axes_between_nodes(hardware.ranks_per_node)
    return partial(eqn_seconds, hardware=hardware, between=between)


def seconds(graph: Graph, hardware: Hardware = CPU_CORE, *, between: Collection[str] = ()) -> float:
    """Estimated time of a graph in the order it has, on two lanes: see `eqn_seconds` and `lanes`.

    Equations compute one after the other; collectives run beside them, one after the other, from their start on, and a
    `wait` stops compute until its collective has ended. While one runs, compute is slower by `hardware.slowdown`.
    """
    timed = partial(eqn_seconds, hardware=hardware, between=between)
    return lanes(graph, timed, hardware.slowdown).total


def products(graph: Graph, times: int = 1) -> Iterator[tuple[Eqn, int]]:
    """Every product of a graph, those in attributes' graphs too, with how often it runs (of branches: of the first)."""
    for eqn in graph.eqns:
        if eqn.op in PRODUCTS:
            yield eqn, times
        elif eqn.op is scan:
            yield from products(eqn.attrs["body"], times * int(eqn.attrs["length"]))
        elif eqn.op is while_:
            yield from products(eqn.attrs["body"], times)
        elif eqn.op is cond:
            yield from products(eqn.attrs["branches"][0], times)


def peak_seconds(graph: Graph, hardware: Hardware) -> float:
    """What the products of a graph would take at the hardware's peak, and nothing else any time."""
    return sum(
        times * eqn_flops(eqn) / hardware.peak(eqn.operands[0].type.dtype)
        for eqn, times in products(graph)
    )


def _rate(eqn: Eqn, hardware: Hardware) -> float:
    if eqn.op in PRODUCTS:
        return hardware.peak(eqn.operands[0].type.dtype) * hardware.product_efficiency
    wide = any(v.type.dtype in (f64,) for v in eqn.results)
    return hardware.peak(f64 if wide else f32)


def _link(eqn: Eqn, hardware: Hardware, between: Collection[str]) -> Link:
    outside = eqn.attrs["axis"] in between or eqn.attrs["size"] > hardware.ranks_per_node
    return hardware.between if outside else hardware.inside
