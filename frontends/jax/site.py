"""What a lowering rule sees: one equation of a jaxpr, apart from its operands; and helpers that rules share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph, Source, Value
from plait.core_ir.mesh import Layout
from plait.core_ir.op import Op
from plait.core_ir.ops.shape import slice_
from plait.core_ir.types import TensorType
from plait.frontends.jax.jaxpr import ClosedJaxpr, JaxprEqn, is_key_atom
from plait.frontends.jax.marks import Marks
from plait.frontends.jax.sharded import Operand


@dataclass(frozen=True)
class Body:
    """A jaxpr as a graph of its own, and how its results lay before they were brought to what was wanted."""

    graph: Graph
    found: Sequence[Layout]


class Lowering(Protocol):
    """Lowering of jaxprs inside an equation."""

    def inline(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Operand) -> list[Operand]:
        """The results of a jaxpr, its equations appended to `b`."""

    def inline_whole(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Value) -> list[Value]:
        """As `inline`; the results are whole."""

    def recompute(self, b: Builder, jaxpr: ClosedJaxpr, *operands: Operand) -> list[Operand]:
        """As `inline`, for a jaxpr that computes again what the forward computed."""

    def body(
        self,
        name: str,
        jaxpr: ClosedJaxpr,
        given: Sequence[Layout] | None = None,
        wanted: Sequence[Layout] | None = None,
    ) -> Body:
        """A jaxpr as a graph of its own, of parts: operands lie as given, results as wanted (None: all are whole)."""

    def whole(self, b: Builder, x: Operand) -> Value:
        """The whole of what may be sharded: gathered once."""

    def laid_out(self, b: Builder, x: Operand, layout: Layout) -> Value:
        """This rank's part of x by a layout."""

    @property
    def marks(self) -> Marks:
        """The boundary markers met so far."""

    @property
    def axes(self) -> dict[str, int]:
        """Number of ranks along each axis of the mesh, and along each that a `shard_map` met so far is over."""

    @property
    def stage_axis(self) -> str:
        """The axis along which the stages stand."""


@dataclass(frozen=True)
class Site:
    """One equation: its primitive's parameters, the types of its operands and results, where the user wrote it.

    `eqn` is the equation itself, for rules that ask whether an operand is a key.
    """

    eqn: JaxprEqn
    params: Mapping[str, Any]
    results: tuple[TensorType, ...]
    source: Source
    lowering: Lowering
    recomputing: bool = False

    @property
    def result(self) -> TensorType:
        """The type of the only result."""
        (type,) = self.results
        return type


Rule: TypeAlias = Callable[..., Operand | Sequence[Operand]]
"""`rule(b, site, *operands) -> value or values`; only some rules see what is sharded."""


def ints(values: Sequence[Any]) -> tuple[int, ...]:
    """As plain integers."""
    return tuple(int(v) for v in values)


def pairs(values: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], ...]:
    """As tuples of plain integers."""
    return tuple(ints(v) for v in values)


def spread(b: Builder, x: Value, shape: tuple[int, ...]) -> Value:
    """x broadcast as lax does it within one equation: a scalar, or dims of size 1 of equal rank."""
    return b.expand(x, shape)


def key_rank(site: Site) -> int:
    """1 where the first operand is an array of keys, whose carrier has one more dimension; else 0."""
    return int(is_key_atom(site.eqn.invars[0]))


def key_word(b: Builder, keys: Value, index: int) -> Value:
    """Word 0 or 1 of each key: u32[..., 2] -> u32[...]."""
    shape = keys.type.shape[:-1]
    start, limit = (*(0 for _ in shape), index), (*shape, index + 1)
    part = b(slice_, keys, start=start, limit=limit, strides=(1,) * len(start))
    return b.reshape(part, shape)


def plain(op: Op, **attrs: Any) -> Rule:
    """The rule of a primitive that is one op on operands of one shape."""

    def rule(b: Builder, site: Site, *operands: Value) -> Value:
        shape = site.result.shape
        return b(op, *(spread(b, x, shape) for x in operands), **attrs)

    return rule
