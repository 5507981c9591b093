"""What an emitter is: the function that computes one equation with torch operations on carriers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from plait.backends.torch.carriers import carrier, is_narrow, widen, wrap
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.op import Literal, Op
from plait.core_ir.types import DType, TensorType

Run: TypeAlias = Callable[[Graph, Sequence[Tensor], "Scope"], list[Tensor]]


@dataclass(frozen=True)
class Scope:
    """What the equations of one graph share.

    constants: tensors of the constants that are not one number throughout, by digest. They are inputs of the emitted
    graph, and of each loop body in it: no tensor may be made while tracing, and a body sees nothing but its inputs.
    run: emits a graph in a scope, carriers in and out.
    """

    device: torch.device
    constants: Mapping[str, Tensor]
    run: Run

    def inside(self, digests: Sequence[str], tensors: Sequence[Tensor]) -> "Scope":
        """The scope of a body that gets these constants as inputs."""
        return replace(self, constants=dict(zip(digests, tensors, strict=True)))


@dataclass(frozen=True)
class Call:
    """One equation to emit.

    literals: the constants so far, by value. started: the calls of the collectives so far, by the async value.
    """

    eqn: Eqn
    scope: Scope
    literals: Mapping[Value, Literal]
    started: Mapping[Value, "Call"]

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the equation."""
        return self.eqn.attrs

    @property
    def device(self) -> torch.device:
        """Where the graph will run."""
        return self.scope.device

    @property
    def dtype(self) -> DType:
        """Element type of the first operand."""
        return self.eqn.operands[0].type.dtype

    @property
    def result(self) -> TensorType:
        """Type of the first result."""
        return self.eqn.results[0].type

    def type(self, index: int) -> TensorType:
        """Type of an operand."""
        return self.eqn.operands[index].type

    def empty(self, type: TensorType) -> Tensor:
        """A carrier of that type whose content does not matter."""
        return torch.empty(type.shape, dtype=carrier(type.dtype), device=self.device)

    def literal(self, index: int) -> Literal | None:
        """The constant that an operand is, where it is one."""
        return self.literals.get(self.eqn.operands[index])


Emitter: TypeAlias = Callable[..., "Tensor | Sequence[Tensor]"]
"""`emitter(call, *operands) -> result, or all results`, all of them carriers."""

Table: TypeAlias = Mapping[Op, Emitter]


def moves(function: Callable[..., Tensor]) -> Emitter:
    """The emitter of `function(*operands, **attrs)`, which makes no new numbers."""
    return lambda call, *xs: function(*xs, **call.attrs)


def computes(function: Callable[..., Tensor]) -> Emitter:
    """The emitter of `function(*operands, **attrs)` with its result brought back to its element type."""
    return lambda call, *xs: wrap(function(*xs, **call.attrs), call.result.dtype)


def computes_wide(function: Callable[..., Tensor]) -> Emitter:
    """As `computes`, with narrow floats in f32 throughout: for formulas of several torch operations."""

    def emit(call: Call, *xs: Tensor) -> Tensor:
        if is_narrow(call.dtype):
            xs = tuple(widen(x, call.dtype) for x in xs)
        return wrap(function(*xs, **call.attrs), call.result.dtype)

    return emit
