"""Structure without names: keys of attributes and equations, and digests of graphs and values.

Digests are the same in every process, so that an order made from them is too.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.op import Literal


def attr_key(value: object) -> str:
    """Text that is equal for two attribute values exactly when they mean the same."""
    if isinstance(value, Graph):
        return graph_digest(value)
    if isinstance(value, Literal):
        return f"{value.type}:{value.digest}"
    if isinstance(value, tuple):
        return f"({','.join(map(attr_key, value))})"
    return f"{type(value).__name__}:{value!r}"


def op_key(eqn: Eqn) -> str:
    """What an equation does, apart from what it reads: op and attributes."""
    attrs = eqn.attrs
    return (
        f"{eqn.op.name}{{{','.join(f'{name}={attr_key(attrs[name])}' for name in sorted(attrs))}}}"
    )


def graph_digest(graph: Graph) -> str:
    """Equal for two graphs exactly when they have the same inputs, equations and outputs in order, but for names."""
    number = {v: i for i, v in enumerate(graph.inputs)}
    parts = [
        f"{port.role}:{v.type}" for port, v in zip(graph.input_ports, graph.inputs, strict=True)
    ]
    for eqn in graph.eqns:
        parts.append(f"{op_key(eqn)}{[number[o] for o in eqn.operands]}")
        for result in eqn.results:
            number[result] = len(number)
    ports = zip(graph.output_ports, graph.outputs, strict=True)
    parts.extend(f"{port.role}:{number[v]}" for port, v in ports)
    return digest(parts)


def digest(parts: Iterable[str]) -> str:
    """A hash of texts in order."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class ValueKey:
    """How a value is made: without the names of ports, then with them. Orders operands of commutative ops."""

    anonymous: str
    named: str

    @property
    def order(self) -> tuple[str, str]:
        """Structure decides; names only between values of one structure."""
        return (self.anonymous, self.named)


def result_keys(eqn: Eqn, operands: list[ValueKey]) -> list[ValueKey]:
    """Keys of the results of an equation, from those of its operands; the order of commutative ones does not count."""
    anonymous, named = [k.anonymous for k in operands], [k.named for k in operands]
    if eqn.op.commutative:
        anonymous, named = sorted(anonymous), sorted(named)
    what = op_key(eqn)
    return [
        ValueKey(digest([what, str(i), *anonymous]), digest([what, str(i), *named]))
        for i in range(len(eqn.results))
    ]


def input_keys(graph: Graph) -> dict[Value, ValueKey]:
    """Keys of the inputs: by role and type, and by name."""
    keys = {}
    for value, port in zip(graph.inputs, graph.input_ports, strict=True):
        role = f"{port.role}:{value.type}"
        keys[value] = ValueKey(role, f"{role}:{port.name}")
    return keys
