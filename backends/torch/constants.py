"""Constants of a graph that need a tensor: those that are not one number throughout."""

from typing import Any

from plait.backends.torch.carriers import INT64_MAX
from plait.core_ir.graph import Graph
from plait.core_ir.op import Literal
from plait.core_ir.ops.shape import constant
from plait.core_ir.types import u64


def is_uniform(literal: Literal) -> bool:
    """Whether a constant is one number throughout."""
    array = literal.array
    return array.size < 2 or array.tobytes() == array.reshape(-1)[:1].tobytes() * array.size


def number_of(literal: Literal) -> Any:
    """The number that a uniform constant holds, as its carrier holds it."""
    if literal.array.size == 0:
        return 0
    number = literal.array.reshape(-1)[0].item()
    if literal.type.dtype == u64 and number > INT64_MAX:
        return number - 2**64
    return float(number) if literal.type.dtype.kind == "float" else number


def constants_of(graph: Graph) -> list[Literal]:
    """The constants that are not uniform, of the graph and of the graphs in it, each once."""
    found: dict[str, Literal] = {}
    for eqn in graph.eqns:
        if eqn.op is constant and not is_uniform(eqn.attrs["value"]):
            found.setdefault(eqn.attrs["value"].digest, eqn.attrs["value"])
        for attr in eqn.attrs.values():
            for item in attr if isinstance(attr, tuple) else (attr,):
                if isinstance(item, Graph):
                    found.update((c.digest, c) for c in constants_of(item))
    return list(found.values())
