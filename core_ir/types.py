"""Types of values: element types, tensor types, and the types of what is under way between ranks.

A tensor type is a dtype and a shape. There are no strides: every port is row-major contiguous.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

Dim: TypeAlias = int
"""A size. All arithmetic on sizes goes through this alias, so that symbolic sizes can come later."""

Kind: TypeAlias = Literal["bool", "signed", "unsigned", "float", "complex"]


@dataclass(frozen=True)
class DType:
    """An element type: its name in text, the NumPy dtype that carries its meaning, and its kind."""

    name: str
    numpy: np.dtype[np.generic]
    kind: Kind

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.numpy.itemsize)

    @property
    def is_integer(self) -> bool:
        """Whether this is a signed or an unsigned integer type (bool is not)."""
        return self.kind in ("signed", "unsigned")

    @property
    def is_inexact(self) -> bool:
        """Whether this is a floating-point or a complex type: the types that have gradients."""
        return self.kind in ("float", "complex")

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        return (dtype, (self.name,))


def _dtype(name: str, numpy: object, kind: Kind) -> DType:
    return DType(name, np.dtype(numpy), kind)  # type: ignore[call-overload]


bool_ = _dtype("bool", np.bool_, "bool")
i8 = _dtype("i8", np.int8, "signed")
i16 = _dtype("i16", np.int16, "signed")
i32 = _dtype("i32", np.int32, "signed")
i64 = _dtype("i64", np.int64, "signed")
u8 = _dtype("u8", np.uint8, "unsigned")
u16 = _dtype("u16", np.uint16, "unsigned")
u32 = _dtype("u32", np.uint32, "unsigned")
u64 = _dtype("u64", np.uint64, "unsigned")
f16 = _dtype("f16", np.float16, "float")
bf16 = _dtype("bf16", ml_dtypes.bfloat16, "float")
f32 = _dtype("f32", np.float32, "float")
f64 = _dtype("f64", np.float64, "float")
f8e4m3fn = _dtype("f8e4m3fn", ml_dtypes.float8_e4m3fn, "float")
f8e5m2 = _dtype("f8e5m2", ml_dtypes.float8_e5m2, "float")
c64 = _dtype("c64", np.complex64, "complex")
c128 = _dtype("c128", np.complex128, "complex")

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        *(bool_, i8, i16, i32, i64, u8, u16, u32, u64),
        *(f16, bf16, f32, f64, f8e4m3fn, f8e5m2, c64, c128),
    )
}
_BY_NUMPY = {d.numpy: d for d in DTYPES.values()}


def dtype(name: str) -> DType:
    """The dtype of that name in text; KeyError when there is none."""
    return DTYPES[name]


def dtype_of(array_dtype: object) -> DType:
    """The dtype that carries a NumPy (or ml_dtypes) dtype; KeyError when there is none."""
    return _BY_NUMPY[np.dtype(array_dtype)]  # type: ignore[call-overload,unused-ignore]


@dataclass(frozen=True)
class TensorType:
    """`f32[8, 512]`: an element type and a shape; rank 0 is `f32[]`."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):
            raise TypeError(f"TensorType needs a DType, got {self.dtype!r}")
        if not all(isinstance(d, int) and not isinstance(d, bool) and d >= 0 for d in self.shape):
            raise ValueError(f"TensorType needs sizes >= 0, got {self.shape!r}")

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> Dim:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    def with_shape(self, shape: Iterable[Dim]) -> "TensorType":
        """The same element type with another shape."""
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> "TensorType":
        """The same shape with another element type."""
        return TensorType(dtype, self.shape)

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, init=False, repr=False)
class AsyncType(TensorType):
    """`async<f32[8, 4]>`: what a collective has started to write, for one `wait` to read.

    It has the dtype, the shape and the bytes of the tensor to come, for whoever reserves its memory. It equals no
    tensor type, and `Op.types` keeps it from every op but `wait`.
    """

    def __init__(self, type: TensorType) -> None:
        if isinstance(type, AsyncType):
            raise TypeError(f"AsyncType needs a tensor type, got {type!r}")
        super().__init__(type.dtype, type.shape)

    @property
    def type(self) -> TensorType:
        """The type of the tensor to come."""
        return TensorType(self.dtype, self.shape)

    def __repr__(self) -> str:
        return f"async<{self.type}>"


KEY = TensorType(u32, (2,))
"""The type of a PRNG key."""


def type_of(array: np.ndarray[Any, np.dtype[Any]]) -> TensorType:
    """The type of a NumPy array."""
    return TensorType(dtype_of(array.dtype), tuple(int(d) for d in array.shape))
