"""A case of an op: a graph of that op alone, inputs, and how close a backend must come.

The NumPy meaning (`Op.evaluate`) is the oracle. Every call is one equation; its results are outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Array, Op
from plait.core_ir.ops import OPS
from plait.core_ir.types import DTYPES, DType, TensorType, dtype_of, type_of

Tolerance = Literal["exact", "rounded", "summed"]

RELATIVE: dict[str, float] = {
    **{"f64": 1e-12, "c128": 1e-12, "f32": 4e-6, "c64": 4e-6},
    **{"f16": 4e-3, "bf16": 3e-2, "f8e4m3fn": 0.13, "f8e5m2": 0.26},
}
"""How far two sound implementations may differ: 30 units in the last place; f16, bf16 4; f8 1."""


@dataclass(frozen=True, eq=False)
class OpCase:
    """Calls of one op with their inputs.

    tolerance: "exact" (equal values, NaN where NaN), "rounded" (each element to `RELATIVE`,
    absolute below 1), "summed" (each element to `RELATIVE` times the largest of its result).
    """

    name: str
    op: Op
    graph: Graph
    inputs: tuple[Array, ...]
    tolerance: Tolerance

    def expected(self) -> list[Array]:
        """The results by the NumPy meaning."""
        return interpret(self.graph, self.inputs)

    def check(self, results: Sequence[Array]) -> None:
        """AssertionError naming the case, the result and its type, unless all is as expected."""
        expected = self.expected()
        assert len(results) == len(expected), f"{self.name}: {len(results)} results"
        for index, (got, want) in enumerate(zip(results, expected, strict=True)):
            where = f"{self.name}, result {index}"
            assert type_of(got) == type_of(want) == self.graph.outputs[index].type, (
                f"{where}: {type_of(got)}, expected {self.graph.outputs[index].type}"
            )
            assert_close(got, want, self.tolerance, f"{where}: {type_of(want)}")


Call = tuple[tuple[Array, ...], dict[str, Any]]


def call(*operands: object, **attrs: Any) -> Call:
    """One equation: arrays and attributes."""
    return tuple(np.asarray(x) for x in operands), attrs


def case(op: str, label: str, *calls: Call, tolerance: Tolerance = "exact") -> OpCase:
    """The case `op-label` of some calls."""
    builder = Builder(op.replace("-", "_"))
    inputs: list[Array] = []
    for operands, attrs in calls:
        values = [builder.input(type_of(x)) for x in operands]
        inputs.extend(operands)
        for result in builder.emit(OPS[op], *values, **attrs):
            builder.output(result)
    return OpCase(f"{op}-{label}", OPS[op], builder.build(), tuple(inputs), tolerance)


def assert_close(got: Array, want: Array, tolerance: Tolerance, where: str) -> None:
    """AssertionError unless each element of `got` is near enough to that of `want`."""
    dtype = dtype_of(want.dtype)
    if not dtype.is_inexact:
        np.testing.assert_array_equal(got, want, err_msg=where)
        return
    wide = np.complex128 if dtype.kind == "complex" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=f"{where}: NaN")
    finite = np.isfinite(b)
    np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=f"{where}: not finite")
    a, b = a[finite], b[finite]
    if tolerance == "exact":
        np.testing.assert_array_equal(a, b, err_msg=where)
        return
    scale = np.abs(b).max(initial=1e-30) if tolerance == "summed" else np.maximum(np.abs(b), 1)
    error = (np.abs(a - b) / scale).max(initial=0)
    assert error <= RELATIVE[dtype.name], f"{where}: relative error {error:.3g}"


# Arrays for cases.

FLOATS = ("f32", "f64", "f16", "bf16")
SMALL_FLOATS = ("f8e4m3fn", "f8e5m2")
SIGNED = ("i8", "i16", "i32", "i64")
UNSIGNED = ("u8", "u16", "u32", "u64")
INTEGERS = SIGNED + UNSIGNED
COMPLEX = ("c64", "c128")
ALL = tuple(DTYPES)


def named(dtype: str) -> DType:
    """The dtype of that name."""
    return DTYPES[dtype]


def cast(numbers: Array, dtype: str) -> Array:
    """The numbers in that dtype; what is too large becomes infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(numbers.astype(DTYPES[dtype].numpy))


def type_(dtype: str, *shape: int) -> TensorType:
    """A tensor type."""
    return TensorType(DTYPES[dtype], shape)


def edges(dtype: str) -> Array:
    """A vector of the values at which implementations of that dtype differ (no subnormals)."""
    d = DTYPES[dtype]
    if d.kind == "bool":
        return np.array([False, True, True])
    if d.is_integer:
        info = np.iinfo(d.numpy)
        low = [info.min, info.min + 1, -1, -3, -7] if d.kind == "signed" else [info.max // 2 + 1]
        return np.array([*low, 0, 1, 2, 3, 5, 8, info.max - 1, info.max], dtype=d.numpy)
    numbers = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.25, -0.75, 7]
    if d.kind == "complex":
        return np.array([complex(a, b) for a in numbers[:9] for b in (0.25, -1.5)], dtype=d.numpy)
    return np.array([*numbers, np.inf, -np.inf, np.nan], dtype=d.numpy)


def pairs(dtype: str, right: Array | None = None) -> tuple[Array, Array]:
    """Every edge value beside every other one (or beside every value of `right`)."""
    left = edges(dtype)
    right = left if right is None else right
    return np.repeat(left, len(right)), np.tile(right, len(left))


def random(dtype: str, *shape: int, seed: int = 0) -> Array:
    """Numbers about 1 in size; for integers and bool small ones with ties."""
    rng = np.random.default_rng([seed, *shape])
    d = DTYPES[dtype]
    if d.kind == "bool":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if d.is_integer:
        low = -5 if d.kind == "signed" else 0
        return np.asarray(rng.integers(low, 6, shape).astype(d.numpy))
    numbers = rng.standard_normal(shape)
    if d.kind == "complex":
        return np.asarray((numbers + 1j * rng.standard_normal(shape)).astype(d.numpy))
    return np.asarray(numbers.astype(d.numpy))


def ties(dtype: str, *shape: int, nan: bool = True, seed: int = 0) -> Array:
    """Few distinct values, so that most are equal to others; floats with NaN, -0 and infinities."""
    d = DTYPES[dtype]
    pool = edges(dtype)
    if d.kind == "float":
        pool = np.array([-1, -0.0, 0.0, 2, np.inf, -np.inf, *([np.nan] if nan else [])], d.numpy)
    elif d.is_integer:
        pool = pool[np.array([0, 1, 2, -1, -2, len(pool) // 2])]
    rng = np.random.default_rng([seed, *shape])
    return np.asarray(pool[rng.integers(0, len(pool), shape)])
