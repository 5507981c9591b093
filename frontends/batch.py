"""Batches: which leaves are cut into microbatches, which go whole, which are static; and the cutting.

Works on arrays of any framework through their shape, dtype and slicing alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from plait.core_ir.arrays import array_type, is_array, to_numpy
from plait.core_ir.errors import BatchError
from plait.core_ir.types import DType, TensorType, f32, f64, i32, i64, u32, u64

LeafKind: TypeAlias = Literal["cut", "whole", "static"]

_NARROWED = {i64: i32, u64: u32, f64: f32}


@dataclass(frozen=True)
class BatchLeaf:
    """One leaf of the batch.

    "cut": an array of rank >= 1, cut along dim 0 into microbatches; `type` is that of one microbatch.
    "whole": an array of rank 0 or a Python number, given to every microbatch as an input of that `type`.
    "static": str, bool or None, part of the program; `value` is what it was at compile time.
    """

    name: str
    kind: LeafKind
    type: TensorType | None = None
    value: object = None


@dataclass(frozen=True)
class BatchSpec:
    """The structure of a batch as the pipeline was compiled for it.

    `narrow`: 64-bit arrays become 32-bit ones, as JAX does by default.
    """

    leaves: tuple[BatchLeaf, ...]
    num_microbatches: int
    narrow: bool

    def microbatches(
        self, leaves: Sequence[tuple[str, Any]], needed: frozenset[str] | None = None
    ) -> list[dict[str, Any]]:
        """Arrays by leaf name for each microbatch (slices of the caller's arrays, in the port's dtype).

        `needed`: names that may not be None here; others may be (a rank that does not read them). BatchError names the
        leaf, what it was compiled for and what came.
        """
        given, expected = dict(leaves), [leaf.name for leaf in self.leaves]
        if len(given) == len(leaves) and given.keys() == set(expected):
            leaves = [(name, given[name]) for name in expected]  # a dict in another order
        names = [name for name, _ in leaves]
        if names != expected:
            missing = [n for n in expected if n not in names]
            extra = [n for n in names if n not in expected]
            raise BatchError(
                f"the batch has another structure than the one compiled for: missing {missing}, "
                f"unexpected {extra}; pass a batch of the same structure, or compile again"
            )
        parts: list[dict[str, Any]] = [{} for _ in range(self.num_microbatches)]
        for spec, (_, leaf) in zip(self.leaves, leaves, strict=True):
            if spec.type is None:
                self._check_static(spec, leaf)
                continue
            if leaf is None and needed is not None and spec.name not in needed:
                continue
            array = self._checked(spec, leaf)
            length = spec.type.shape[0] if spec.kind == "cut" else 0
            for index, part in enumerate(parts):
                start = index * length
                part[spec.name] = array[start : start + length] if spec.kind == "cut" else array
        return parts

    def _check_static(self, spec: BatchLeaf, leaf: object) -> None:
        if type(leaf) is not type(spec.value) or leaf != spec.value:
            raise BatchError(
                f"{_place(spec.name)} is static: compiled for {spec.value!r}, got {leaf!r}; "
                "compile again for another value"
            )

    def _checked(self, spec: BatchLeaf, leaf: Any) -> Any:
        assert spec.type is not None
        where = _place(spec.name)
        if leaf is None:
            raise BatchError(
                f"{where} is None, but a stage that runs here reads it; pass its array"
            )
        array = leaf if is_array(leaf) else _number(leaf, where)
        found = array_type(array)
        shape = spec.type.shape
        if spec.kind == "cut":
            shape = (shape[0] * self.num_microbatches, *shape[1:])
        if found.shape != shape:
            empty = spec.kind == "cut" and found.shape[:1] == (0,)
            advice = (
                "leave empty batches out"
                if empty
                else "pad the batch, or compile again for this shape"
            )
            raise BatchError(
                f"{where}: compiled for shape {list(shape)} ({self.num_microbatches} microbatches), "
                f"got {list(found.shape)}; {advice}"
            )
        return _converted(array, found.dtype, spec.type.dtype, where)


def batch_spec(
    leaves: Sequence[tuple[str, Any]], num_microbatches: int, *, narrow: bool
) -> BatchSpec:
    """The spec of a batch given as `[(name, leaf)]`; BatchError where lengths differ or do not divide.

    `narrow` is for JAX models: 64-bit arrays (not those of JAX itself, which says what it wants) become 32-bit.
    """
    if num_microbatches < 1:
        raise BatchError(f"num_microbatches must be at least 1, got {num_microbatches}")
    _check_lengths(leaves)
    specs = tuple(_leaf(name, leaf, num_microbatches, narrow) for name, leaf in leaves)
    return BatchSpec(specs, num_microbatches, narrow)


def example_microbatch(spec: BatchSpec, leaves: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    """The first microbatch of a batch, static leaves included: what a frontend captures with."""
    first = dict(spec.microbatches(leaves)[0])
    first.update((leaf.name, leaf.value) for leaf in spec.leaves if leaf.kind == "static")
    return first


def _place(name: str) -> str:
    """A leaf, as messages call it; the batch itself where it is one array."""
    return f"batch leaf {name!r}" if name else "the batch"


def _check_lengths(leaves: Sequence[tuple[str, Any]]) -> None:
    """Arrays are cut together, so that a microbatch holds the same rows of each."""
    arrays = [(name, tuple(x.shape)) for name, x in leaves if is_array(x) and len(x.shape)]
    for name, shape in arrays:
        first, whole = arrays[0]
        if shape[0] != whole[0]:
            raise BatchError(
                f"{_place(first)} has {whole[0]} rows (dim 0) and {_place(name)} has {shape[0]}: each array of a batch "
                "is cut along dim 0 into microbatches, so all must have as many; an array that every microbatch needs "
                "whole (class weights, a table) does not belong in the batch: give whole arrays as a closure of the "
                "loss, or repeat them for each row"
            )


def _leaf(name: str, leaf: Any, num_microbatches: int, narrow: bool) -> BatchLeaf:
    where = _place(name)
    if leaf is None or isinstance(leaf, (str, bool)):
        return BatchLeaf(name, "static", value=leaf)
    array = leaf if is_array(leaf) else _number(leaf, where)
    found = array_type(array)
    if narrow and found.dtype in _NARROWED and not _is_jax(array):
        found = found.with_dtype(_NARROWED[found.dtype])
    if found.rank == 0:
        return BatchLeaf(name, "whole", found)
    length = found.shape[0]
    if not length:
        raise BatchError(
            f"{where} has 0 rows (dim 0), and a batch is cut along dim 0 into num_microbatches={num_microbatches} of "
            "at least one row each; leave empty batches out"
        )
    if length % num_microbatches:
        raise BatchError(
            f"{where} has {length} rows (dim 0), which num_microbatches={num_microbatches} does not "
            "divide; change one of the two"
        )
    return BatchLeaf(name, "cut", found.with_shape((length // num_microbatches, *found.shape[1:])))


def _number(leaf: Any, where: str) -> Any:
    if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool):
        kind = {int: np.int64, float: np.float32, complex: np.complex64}[type(leaf)]
        return np.asarray(leaf, dtype=kind)
    raise BatchError(
        f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}; a batch holds arrays of torch, "
        "JAX or NumPy, numbers, strings, booleans and None"
    )


def _is_jax(array: Any) -> bool:
    return type(array).__module__.split(".")[0] in ("jax", "jaxlib")


def _converted(array: Any, found: DType, wanted: DType, where: str) -> Any:
    if found == wanted:
        return array
    if _NARROWED.get(found) != wanted:
        raise BatchError(
            f"{where}: compiled for dtype {wanted}, got {found}; convert it, or compile again for {found}"
        )
    content = to_numpy(array)
    if wanted.is_integer and content.size:
        low, high = np.iinfo(str(wanted.numpy)).min, np.iinfo(str(wanted.numpy)).max
        if content.min() < low or content.max() > high:
            raise BatchError(
                f"{where}: values from {content.min()} to {content.max()} do not fit {wanted}, the dtype "
                f"compiled for; a JAX model reads {found} as {wanted}"
            )
    return content.astype(wanted.numpy)
