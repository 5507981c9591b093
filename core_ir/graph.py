"""Values, equations and graphs: an immutable dataflow program in SSA form, in topological order.

A pass never changes a graph; it returns a new one and reuses the equations it did not change, so a Value may stand in
several graphs but has one definition in each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args
from typing import Literal as OneOf

from plait.core_ir.op import Op
from plait.core_ir.types import TensorType

Role = OneOf[
    "",  # inside an attribute's graph, and where no role applies
    "param",  # a parameter, by the user's name
    "buffer",  # state that is not differentiated: as read by F, as it was before the microbatch
    "buffer_update",  # the same state as F leaves it
    "batch",  # a leaf of the batch
    "rng_key",  # the microbatch's key
    "activation",  # crosses stages forward
    "gradient",  # the cotangent of an activation, crosses stages backward
    "residual",  # F -> B (or I, W) of one stage
    "handover",  # I -> W of one stage
    "loss",
    "loss_grad",  # the cotangent of the loss: 1/M or 1
    "aux",
    "param_grad",  # the gradient of the parameter of the same name
    "shard",  # this rank's rows of a parameter, padded (core_ir/shards.py)
    "shard_grad",  # the gradient, summed over ranks, of the rows that this rank holds: of a shard, else of the whole
]
ROLES: frozenset[str] = frozenset(get_args(Role))


class Value:
    """One value: its identity is what it is, its type is fixed, its name is a hint for text."""

    __slots__ = ("name", "type")

    def __init__(self, type: TensorType, name: str = "") -> None:
        self.type = type
        self.name = name

    def __repr__(self) -> str:
        return f"%{self.name or '_'}: {self.type}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the user wrote an equation: module path, file and line (each may be unknown)."""

    module: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return " ".join(part for part in (self.module, place) if part) or "unknown source"


UNKNOWN = Source()


@dataclass(frozen=True, slots=True)
class Port:
    """What an input or output of a graph is for, and the user's name of it.

    In the tasks of one stage, ports of equal role and name are one value.
    """

    role: Role = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown port role {self.role!r}; roles are {sorted(ROLES)}")

    def __str__(self) -> str:
        return f"{self.role} {self.name!r}" if self.name else self.role


@dataclass(frozen=True, eq=False, slots=True)
class Eqn:
    """`results = op(operands) {attrs}`, with where the user wrote it."""

    op: Op
    operands: tuple[Value, ...]
    attrs: Mapping[str, Any]
    results: tuple[Value, ...]
    source: Source = UNKNOWN

    def __post_init__(self) -> None:
        if not isinstance(self.attrs, MappingProxyType):
            object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def with_operands(self, operands: Sequence[Value]) -> "Eqn":
        """The same equation (same results) reading other operands; itself when nothing changes."""
        if all(a is b for a, b in zip(operands, self.operands, strict=True)):
            return self
        return Eqn(self.op, tuple(operands), self.attrs, self.results, self.source)


@dataclass(frozen=True, eq=False)
class Graph:
    """A program: inputs, equations in an order in which each reads only what stands before it, outputs.

    `input_ports` and `output_ports` stand beside `inputs` and `outputs`, one for each.
    """

    name: str
    inputs: tuple[Value, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Value, ...]
    input_ports: tuple[Port, ...] = ()
    output_ports: tuple[Port, ...] = ()

    def __post_init__(self) -> None:
        if not self.input_ports:
            object.__setattr__(self, "input_ports", (Port(),) * len(self.inputs))
        if not self.output_ports:
            object.__setattr__(self, "output_ports", (Port(),) * len(self.outputs))
        if len(self.input_ports) != len(self.inputs) or len(self.output_ports) != len(self.outputs):
            raise ValueError(f"graph {self.name}: one port for each input and each output")

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        """Types of the inputs."""
        return tuple(v.type for v in self.inputs)

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        """Types of the outputs."""
        return tuple(v.type for v in self.outputs)

    def inputs_of(self, role: Role) -> Iterator[tuple[str, Value]]:
        """`(name, value)` of each input of that role, in order."""
        return (
            (p.name, v)
            for p, v in zip(self.input_ports, self.inputs, strict=True)
            if p.role == role
        )

    def outputs_of(self, role: Role) -> Iterator[tuple[str, Value]]:
        """`(name, value)` of each output of that role, in order."""
        return (
            (p.name, v)
            for p, v in zip(self.output_ports, self.outputs, strict=True)
            if p.role == role
        )

    def producers(self) -> dict[Value, Eqn]:
        """The equation that defines each value that is not an input."""
        return {r: eqn for eqn in self.eqns for r in eqn.results}
