"""How close two results are, in the one measure that tests, `compare` and benchmarks share, and how close they must be.

Gradients are compared by name. Some are zero in exact arithmetic, so an error is relative to the largest entry of its
own gradient, but at least to a thousandth of the largest entry of all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from plait.core_ir.errors import UsageError
from plait.core_ir.op import Array

Purpose: TypeAlias = Literal["framework", "backends"]
"""A result is compared with that of its own framework, unpipelined, or with one that another backend gave."""

SMALLEST_SCALE = 1e-3


@dataclass(frozen=True)
class Tolerance:
    """The largest errors allowed: of a loss by `relative_error`, of gradients by `gradient_error`."""

    loss: float
    grads: float


TOLERANCES: Mapping[tuple[Purpose, str], Tolerance] = {
    ("framework", "f64"): Tolerance(loss=1e-10, grads=1e-10),
    ("framework", "f32"): Tolerance(loss=1e-6, grads=1e-5),
    ("framework", "bf16"): Tolerance(loss=2e-2, grads=2e-2),
    ("backends", "f64"): Tolerance(loss=1e-10, grads=1e-10),
    ("backends", "f32"): Tolerance(loss=1e-5, grads=1e-4),
    ("backends", "bf16"): Tolerance(loss=2e-2, grads=2e-2),
}


def gradient_error(grads: Mapping[str, Array], reference: Mapping[str, Array]) -> float:
    """The largest over names of max|g - r| / max(max|r|, 1e-3 of the largest |r| over all names).

    A NaN or an infinity that the other side does not have at the same place is an infinite error, and so is any
    difference where all of the reference is zero. Raises UsageError where names or shapes differ.
    """
    return max(gradient_errors(grads, reference).values(), default=0.0)


def gradient_errors(
    grads: Mapping[str, Array], reference: Mapping[str, Array], *, partial: bool = False
) -> dict[str, float]:
    """The error of each gradient by name: what `gradient_error` is the largest of.

    partial: `grads` may lack names, as those of one rank do; scales are those of the whole reference all the same.
    """
    missing, extra = sorted(set(reference) - set(grads)), sorted(set(grads) - set(reference))
    if extra or (missing and not partial):
        raise UsageError(f"gradients do not match the reference: missing {missing}, extra {extra}")
    largest = max(map(_largest, reference.values()), default=0.0)
    errors = {}
    for name, grad in grads.items():
        difference = _difference(grad, reference[name], f"gradient {name!r}")
        scale = max(_largest(reference[name]), SMALLEST_SCALE * largest)
        errors[name] = _ratio(difference, scale)
    return errors


def relative_error(a: Array | float, b: Array | float) -> float:
    """|a - b| / |b| of two losses or arrays, by their largest entries; `b` is the reference.

    0.0 where they are equal, infinite where only one is NaN or infinite, or where `b` alone is zero. Raises UsageError
    where shapes differ.
    """
    return _ratio(_difference(a, b, "the value"), _largest(b))


def tolerance(dtype: str, purpose: Purpose) -> Tolerance:
    """The tolerance for results of a dtype ("f32"); UsageError, listing the dtypes, where there is none."""
    found = TOLERANCES.get((purpose, dtype))
    if found is None:
        known = ", ".join(name for kind, name in TOLERANCES if kind == purpose)
        raise UsageError(f"there is no tolerance for dtype {dtype!r}; there are: {known}")
    return found


def _wide(x: Array | float) -> Array:
    """The numbers with more precision than any of them has."""
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _largest(x: Array | float) -> float:
    """The largest finite magnitude; 0.0 of nothing."""
    magnitudes = np.abs(_wide(x))
    return float(magnitudes.max(initial=0.0, where=np.isfinite(magnitudes)))


def _difference(found: Array | float, expected: Array | float, what: str) -> float:
    """The largest |found - expected|; infinite where NaN or infinity stands on one side alone."""
    a, b = _wide(found), _wide(expected)
    if a.shape != b.shape:
        raise UsageError(f"{what} has shape {list(a.shape)}, the reference {list(b.shape)}")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not np.isfinite(a[~same]).all() or not np.isfinite(b[~same]).all():
        return math.inf
    return float(np.abs(a[~same] - b[~same]).max(initial=0.0))


def _ratio(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf
