"""Building graphs: a Builder appends equations, infers their types, and knows where the user wrote them.

b = Builder("square")
x = b.input(TensorType(f32, (3,)), "activation", "x")
b.output(b(ops.mul, x, x), "activation", "y")
graph = b.build()
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from plait.core_ir.errors import TypeRuleError
from plait.core_ir.graph import UNKNOWN, Eqn, Graph, Port, Role, Source, Value
from plait.core_ir.op import Literal, Op
from plait.core_ir.ops.elementwise import convert
from plait.core_ir.ops.shape import broadcast, constant, reshape, transpose
from plait.core_ir.types import DType, TensorType


class Builder:
    """Collects the inputs, equations and outputs of one graph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: Source = UNKNOWN
        self._inputs: list[Value] = []
        self._input_ports: list[Port] = []
        self._eqns: list[Eqn] = []
        self._outputs: list[Value] = []
        self._output_ports: list[Port] = []

    @classmethod
    def of(cls, graph: Graph) -> Self:
        """Goes on where a graph ends: its name, inputs and equations are there, its outputs are still to be said."""
        builder = cls(graph.name)
        builder._inputs.extend(graph.inputs)
        builder._input_ports.extend(graph.input_ports)
        builder._eqns.extend(graph.eqns)
        return builder

    def input(self, type: TensorType, role: Role = "", name: str = "") -> Value:
        """A new input of the graph."""
        value = Value(type, name if not role else "")
        self._inputs.append(value)
        self._input_ports.append(Port(role, name if role else ""))
        return value

    def output(self, value: Value, role: Role = "", name: str = "") -> None:
        """Make a value an output of the graph."""
        self._outputs.append(value)
        self._output_ports.append(Port(role, name))

    @contextmanager
    def at(self, source: Source) -> Iterator[None]:
        """Equations made inside carry this source."""
        before, self.source = self.source, source
        try:
            yield
        finally:
            self.source = before

    def emit(self, op: Op, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
        """Append an equation; its results. TypeRuleError, with the source, where types do not fit."""
        try:
            types = op.types([v.type for v in operands], attrs)
        except TypeRuleError as error:
            raise TypeRuleError(f"{self.source}: {error}") from None
        results = tuple(Value(t) for t in types)
        self._eqns.append(Eqn(op, operands, attrs, results, self.source))
        return results

    def __call__(self, op: Op, *operands: Value, **attrs: Any) -> Value:
        """Append an equation with one result; that result."""
        (result,) = self.emit(op, *operands, **attrs)
        return result

    def append(self, eqn: Eqn) -> None:
        """Append an equation that stands elsewhere already, as it is."""
        self._eqns.append(eqn)

    def build(self) -> Graph:
        """The graph collected so far."""
        return Graph(
            self.name,
            tuple(self._inputs),
            tuple(self._eqns),
            tuple(self._outputs),
            tuple(self._input_ports),
            tuple(self._output_ports),
        )

    # Shapes and constants that every lowering needs.

    def literal(self, array: object, dtype: DType | None = None) -> Value:
        """A constant with the content of a NumPy array, or of a Python number in `dtype`."""
        content = np.asarray(array) if dtype is None else np.asarray(array).astype(dtype.numpy)
        return self(constant, value=Literal(content))

    def full(self, type: TensorType, number: complex) -> Value:
        """A value of that type with one number in every element."""
        return self.expand(self.literal(number, type.dtype), type.shape)

    def expand(self, x: Value, shape: Sequence[int], dims: Sequence[int] | None = None) -> Value:
        """Broadcast to `shape`; `dims` says where each dimension of x goes (default: the last ones)."""
        shape = tuple(shape)
        rank = len(x.type.shape)
        dims = tuple(dims) if dims is not None else tuple(range(len(shape) - rank, len(shape)))
        if shape == x.type.shape and dims == tuple(range(rank)):
            return x
        return self(broadcast, x, shape=shape, dims=dims)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """x in another shape with as many elements; x itself when it has that shape."""
        return x if x.type.shape == tuple(shape) else self(reshape, x, shape=tuple(shape))

    def transpose(self, x: Value, permutation: Sequence[int]) -> Value:
        """Result dimension i is dimension `permutation[i]` of x; x itself for the identity."""
        permutation = tuple(permutation)
        if permutation == tuple(range(len(permutation))):
            return x
        return self(transpose, x, permutation=permutation)

    def convert(self, x: Value, dtype: DType) -> Value:
        """x in another element type; x itself when it has that type."""
        return x if x.type.dtype == dtype else self(convert, x, dtype=dtype)
