"""What an op is: a name, numbered constraints with a type rule, a cost, and a meaning in NumPy.

An op is declared once, in a file of `ops/`. Frontends and backends hold tables keyed by these objects.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np

from plait.core_ir.errors import TypeRuleError
from plait.core_ir.types import AsyncType, DType, TensorType, type_of

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Attrs: TypeAlias = Mapping[str, Any]
"""Attribute values are bool, int, float, str, None, DType, TensorType, Literal, Graph, and tuples of these."""

Types: TypeAlias = Sequence[TensorType]


class GraphLike(Protocol):
    """What a type rule may ask of a graph held in an attribute."""

    @property
    def input_types(self) -> tuple[TensorType, ...]: ...
    @property
    def output_types(self) -> tuple[TensorType, ...]: ...


Run: TypeAlias = Callable[[Any, Sequence[Array]], list[Array]]
"""`run(graph, operands) -> results`: the interpreter, handed to ops that hold graphs."""

InferRule: TypeAlias = Callable[[Types, Attrs], tuple[TensorType, ...]]
EvaluateRule: TypeAlias = Callable[[Sequence[Array], Attrs, Run], Sequence[Array]]
EvaluateRanksRule: TypeAlias = Callable[
    [Sequence[Sequence[Array]], Attrs], Sequence[Sequence[Array]]
]
FlopsRule: TypeAlias = Callable[[Types, Attrs, Types], int]


def elements(_: Types, __: Attrs, results: Types) -> int:
    """One flop for each element of the results: the cost of an elementwise op."""
    return sum(t.size for t in results)


def free(_: Types, __: Attrs, ___: Types) -> int:
    """No flops: the cost of moving data."""
    return 0


@dataclass(frozen=True)
class Attr:
    """One attribute of an op: its name, a predicate on its value, what the predicate expects in words."""

    name: str
    check: Callable[[Any], bool]
    expected: str
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Op:
    """An operation, declared once; compared by identity.

    Attributes
    ----------
    infer: the type rule, `(operand types, attrs) -> result types`; raises through `require`.
    evaluate: the meaning, `(operands, attrs, run) -> results` in NumPy.
    num_operands: how many operands it takes, or None where that varies.
    constraints: numbered from 1; `C2` in an error and in a test's name is the second of these.
    movement: it only moves data (no arithmetic on elements).
    commutative: its two operands may be exchanged without changing a bit of the result.
    effect: never merged, dropped, computed twice or reordered.
    evaluate_ranks: the meaning of an op over a mesh axis, for all ranks of one group at once, in order: `(operands of
        each rank, attrs) -> results of each rank`. Its `evaluate` is that of a group of one.
    takes_async: its operands may be of async types, which no other op takes.
    """

    name: str
    infer: InferRule
    evaluate: EvaluateRule
    num_operands: int | None
    attrs: tuple[Attr, ...] = ()
    constraints: tuple[str, ...] = ()
    flops: FlopsRule = elements
    movement: bool = False
    commutative: bool = False
    effect: bool = False
    evaluate_ranks: EvaluateRanksRule | None = None
    takes_async: bool = False
    doc: str = ""

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def _schema(self) -> dict[str, Attr]:
        return {a.name: a for a in self.attrs}

    def types(self, operands: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        """Result types for these operand types and attributes; TypeRuleError where they do not fit."""
        if self.num_operands is not None and len(operands) != self.num_operands:
            raise TypeRuleError(
                f"{self.name}: expected {self.num_operands} operands, got {len(operands)}"
            )
        if not self.takes_async:
            for number, type_ in enumerate(operands):
                if isinstance(type_, AsyncType):
                    raise TypeRuleError(
                        f"{self.name}: operand {number} is {type_}: wait for it, and read the result of the wait"
                    )
        schema = self._schema
        for name, value in attrs.items():
            attr = schema.get(name)
            if attr is None:
                raise TypeRuleError(
                    f"{self.name}: no attribute {name!r}; it has {', '.join(schema) or 'none'}"
                )
            if not attr.check(value):
                raise TypeRuleError(
                    f"{self.name}: attribute {name} must be {attr.expected}, got {value!r}"
                )
        if len(attrs) < len(schema):
            for attr in self.attrs:
                if not attr.optional and attr.name not in attrs:
                    raise TypeRuleError(
                        f"{self.name}: attribute {attr.name} ({attr.expected}) is missing"
                    )
        return self.infer(operands, attrs)

    def require(self, number: int, holds: bool, found: object) -> None:
        """Raise a TypeRuleError that names constraint `number` and what was found, unless it holds."""
        if not holds:
            raise TypeRuleError(
                f"{self.name}: C{number}: {self.constraints[number - 1]}; got {found}"
            )


class Checks:
    """Requirements inside a type rule that is shared by many ops: `Checks(name, constraints)`.

    A rule is written before its op exists; it holds the numbered constraints and the op takes them over.
    """

    def __init__(self, name: str, *constraints: str) -> None:
        self.name, self.constraints = name, constraints

    def __call__(self, number: int, holds: bool, *found: object) -> None:
        if not holds:
            got = ", ".join(map(str, found))
            raise TypeRuleError(
                f"{self.name}: C{number}: {self.constraints[number - 1]}; got {got}"
            )


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant array held in an attribute: immutable, compared and hashed by content."""

    array: Array
    type: TensorType = field(init=False)

    def __post_init__(self) -> None:
        array = np.array(self.array, order="C", copy=True)
        array.setflags(write=False)
        object.__setattr__(self, "array", array)
        object.__setattr__(self, "type", type_of(array))

    @cached_property
    def digest(self) -> str:
        """Hash of type and content, in hexadecimal: the key in a table of constants."""
        sha = hashlib.sha256(repr(self.type).encode())
        sha.update(self.array.tobytes())
        return sha.hexdigest()[:32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Literal({self.type}, {self.digest[:8]})"


# Attribute declarations that many ops share.


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ints(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_int(v) for v in value)


def int_attr(name: str, *, optional: bool = False) -> Attr:
    """An integer."""
    return Attr(name, _is_int, "an integer", optional)


def float_attr(name: str, *, optional: bool = False) -> Attr:
    """A floating-point number."""
    return Attr(name, lambda v: isinstance(v, float), "a float", optional)


def ints_attr(name: str, *, optional: bool = False) -> Attr:
    """A tuple of integers."""
    return Attr(name, _is_ints, "a tuple of integers", optional)


def pairs_attr(name: str, *, optional: bool = False) -> Attr:
    """A tuple of tuples of integers."""
    return Attr(
        name,
        lambda v: isinstance(v, tuple) and all(_is_ints(p) for p in v),
        "a tuple of tuples of integers",
        optional,
    )


def bool_attr(name: str, *, optional: bool = False) -> Attr:
    """True or False."""
    return Attr(name, lambda v: isinstance(v, bool), "a bool", optional)


def str_attr(name: str, *, optional: bool = False) -> Attr:
    """Any text."""
    return Attr(name, lambda v: isinstance(v, str), "a string", optional)


def choice_attr(name: str, *choices: str, optional: bool = False) -> Attr:
    """One of some words."""
    return Attr(name, lambda v: v in choices, f"one of {', '.join(choices)}", optional)


def dtype_attr(name: str = "dtype", *, optional: bool = False) -> Attr:
    """An element type."""
    return Attr(name, lambda v: isinstance(v, DType), "a dtype", optional)


def graph_attr(name: str) -> Attr:
    """A graph."""
    return Attr(name, lambda v: hasattr(v, "eqns"), "a graph")


def graphs_attr(name: str) -> Attr:
    """A tuple of at least one graph."""
    return Attr(
        name,
        lambda v: isinstance(v, tuple) and len(v) > 0 and all(hasattr(g, "eqns") for g in v),
        "a tuple of graphs",
    )
