"""What a lowering rule is, and what all rules need: the node at hand, operands in explicit types.

A rule is `rule(s, *args, **kwargs) -> result or sequence of results`, with the arguments of the aten op: a Value for
each tensor, Python numbers, lists and None as they stand. A result that nothing reads may be None. A rule that does
not cover its arguments returns NotImplemented.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch._ops import OpOverload

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.mesh import Mesh
from plait.core_ir.op import Op
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.types import DType, TensorType, bool_
from plait.frontends.torch.dtypes import compute_dtype, promote

Number: TypeAlias = bool | int | float | complex
Operand: TypeAlias = Value | Number


@dataclass(frozen=True)
class Hidden:
    """A result of another type than torch says, read by one rule alone: the key that stands for a generator's state."""

    value: Value


Result: TypeAlias = Value | Sequence[Value | Hidden | None]
Rule: TypeAlias = Callable[..., Result]
PlainRule: TypeAlias = Callable[..., Value]
Rules: TypeAlias = Mapping[OpOverload, Rule]


@dataclass(frozen=True)
class Site:
    """One node being lowered.

    types: what torch says of each result (None where it is not a tensor).
    readers: the aten ops that read each result.
    new_key: the key of this node, if it is a random op.
    fakes: the positional arguments as torch saw them, for the rare rule that depends on strides.
    mesh: whose axes collectives may be over.
    """

    b: Builder
    types: tuple[TensorType | None, ...]
    readers: tuple[frozenset[Any], ...]
    new_key: Callable[[], Value]
    fakes: Sequence[Any] = ()
    mesh: Mesh | None = None

    @property
    def type(self) -> TensorType:
        """The type of the first result."""
        first = self.types[0]
        assert first is not None
        return first

    def reads(self, index: int, *except_by: OpOverload) -> bool:
        """Whether anything but these ops reads a result."""
        return index < len(self.readers) and bool(self.readers[index] - set(except_by))

    # Shorthands for equations.

    def __call__(self, op: Op, *operands: Value, **attrs: Any) -> Value:
        """An equation with one result."""
        return self.b(op, *operands, **attrs)

    def like(self, x: Operand, type: TensorType) -> Value:
        """A tensor or a number, converted and broadcast to `type`."""
        if not isinstance(x, Value):
            return self.b.full(type, x)
        return self.b.expand(self.b.convert(x, type.dtype), type.shape)

    def operands(self, *xs: Operand) -> tuple[Value, ...]:
        """Each in the type of the result."""
        return tuple(self.like(x, self.type) for x in xs)

    def add(self, x: Value, y: Operand) -> Value:
        """x + y; a number, or a smaller tensor, takes the type of x. So too below."""
        return self(ew.add, x, self.like(y, x.type))

    def sub(self, x: Value, y: Operand) -> Value:
        """x - y."""
        return self(ew.sub, x, self.like(y, x.type))

    def mul(self, x: Value, y: Operand) -> Value:
        """x * y."""
        return self(ew.mul, x, self.like(y, x.type))

    def div(self, x: Value, y: Operand) -> Value:
        """x / y."""
        return self(ew.div, x, self.like(y, x.type))

    def compare(self, direction: str, x: Value, y: Operand) -> Value:
        """x direction y."""
        return self(ew.compare, x, self.like(y, x.type), direction=direction)

    def select(self, pred: Value, on_true: Operand, on_false: Operand, type: TensorType) -> Value:
        """on_true where pred (of `type`'s shape, or broadcast to it), else on_false."""
        pred = self.like(pred, type.with_dtype(bool_))
        return self(ew.select, pred, self.like(on_true, type), self.like(on_false, type))

    def is_nan(self, x: Value) -> Value:
        """Whether each element is NaN."""
        return self(ew.compare, x, x, direction="ne")


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape by torch's rule."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((d for d in dims if d != 1), 1) for dims in zip(*padded, strict=True))


def common_type(*operands: Operand, dtype: DType | None = None) -> TensorType:
    """Promoted dtype (unless given) and broadcast shape of the operands."""
    shapes = [x.type.shape for x in operands if isinstance(x, Value)]
    return TensorType(dtype or promote(*operands), broadcast_shapes(*shapes))


def in_compute_dtype(rule: PlainRule) -> PlainRule:
    """A rule with one result, run in f32 where its result is f16 or bf16, as torch does inside one op.

    Tensors of the result's dtype go up; the result comes back.
    """

    def wrapped(s: Site, *args: Any, **kwargs: Any) -> Value:
        dtype = s.type.dtype
        wide = compute_dtype(dtype)
        if wide == dtype:
            return rule(s, *args, **kwargs)
        raised = [
            s.b.convert(a, wide) if isinstance(a, Value) and a.type.dtype == dtype else a
            for a in args
        ]
        inner = replace(s, types=(s.type.with_dtype(wide), *s.types[1:]))
        return s.b.convert(rule(inner, *raised, **kwargs), dtype)

    return wrapped


def dim_of(dim: int, rank: int) -> int:
    """A dim that may count from the end, counted from 0; a scalar has one dim."""
    return dim % max(rank, 1)


def dims_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Dims of a reduction, sorted: None and an empty list mean all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(rank))
    chosen = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({dim_of(d, rank) for d in chosen})) if rank else ()
