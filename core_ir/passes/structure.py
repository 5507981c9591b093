"""Structure without names: keys of attributes and equations, and digests of graphs and values.

Digests are the same in every process, so that an order made from them is too.
"""

import hashlib
from collections.abc import Iterable

from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.op import Literal
from plait.core_ir.ops.control import boundary


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


WHOLE, NAMED = 3, 4
"""Places in a key, behind the equation itself and two levels below it."""


class ValueKeys:
    """Keys that say how each value is made; they order the operands of commutative ops.

    The equation that makes the value decides, then what it reads, one level at a time, then all up to the inputs or to
    a stage boundary; then names of ports, then the order of definition. So equal layers, and equal stages, get equal
    orders.
    """

    def __init__(self, graph: Graph) -> None:
        self._keys: dict[Value, tuple[str, ...]] = {}
        self._number = {v: i for i, v in enumerate(graph.inputs)}
        for value, port in zip(graph.inputs, graph.input_ports, strict=True):
            key = f" {port.role}:{value.type}"
            self._keys[value] = (key, key, key, key, f"{key}:{port.name}")

    def add(self, eqn: Eqn) -> None:
        """Take in the next equation."""
        is_cut = eqn.op is boundary
        what = eqn.op.name if is_cut else op_key(eqn)
        operands = [self._keys[o] for o in eqn.operands]
        for number, result in enumerate(eqn.results):
            own = f"{what}:{number}:{result.type}"
            made = [own]
            for level in (0, 1, WHOLE, NAMED):
                parts = [key[level] for key in operands]
                if eqn.op.commutative:
                    parts.sort()
                made.append(digest([own, *parts]))
            if is_cut:
                made[WHOLE] = own
            self._keys[result] = tuple(made)
            self._number[result] = len(self._number)

    def order(self, value: Value) -> tuple[tuple[str, ...], int]:
        """A sort key; no two values have the same."""
        return self._keys[value], self._number[value]
