"""What equations cost: flops, bytes, and a time estimate from them."""

from dataclasses import dataclass

from plait.core_ir.graph import Eqn, Graph


def eqn_flops(eqn: Eqn) -> int:
    """Floating-point operations of one equation; a multiply-add is 2. Ops that hold graphs count these."""
    return eqn.op.flops([v.type for v in eqn.operands], eqn.attrs, [v.type for v in eqn.results])


def eqn_bytes(eqn: Eqn) -> int:
    """Bytes an equation reads and writes when nothing is fused."""
    return sum(v.type.num_bytes for v in (*eqn.operands, *eqn.results))


def flops(graph: Graph) -> int:
    """Floating-point operations of a graph; graphs in attributes count as their ops say."""
    return sum(map(eqn_flops, graph.eqns))


@dataclass(frozen=True)
class Machine:
    """A device for the cost model: flops and bytes a second. The default stands for one CPU core."""

    flops_per_second: float = 2e10
    bytes_per_second: float = 1e10


def seconds(graph: Graph, machine: Machine = Machine()) -> float:
    """Estimated time: the larger of compute and of unfused traffic, summed over equations."""
    total = 0.0
    for eqn in graph.eqns:
        work = eqn_flops(eqn)
        traffic = 0 if eqn.op.movement else eqn_bytes(eqn)
        total += max(work / machine.flops_per_second, traffic / machine.bytes_per_second)
    return total
