"""Arrays of any framework, seen from NumPy, without importing the framework."""

import sys
from typing import Any

import numpy as np

from plait.core_ir.errors import UsageError
from plait.core_ir.op import Array
from plait.core_ir.types import DTYPES, TensorType, dtype_of

TORCH_NAMES = {
    "bool": "bool",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}
"""Names of torch's dtypes, as attributes of `torch`, and of ours."""


def is_torch(x: object) -> bool:
    """Whether x is a torch tensor."""
    return any(t.__module__ == "torch" and t.__name__ == "Tensor" for t in type(x).__mro__)


def is_array(x: object) -> bool:
    """Whether x is an array of torch, JAX or NumPy (a NumPy scalar counts, a Python number does not)."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def array_type(x: Any) -> TensorType:
    """The type of an array of any framework (of metadata alone: fake and abstract arrays too)."""
    shape = tuple(int(d) for d in x.shape)
    name = str(x.dtype)
    if name.startswith("torch."):
        known = TORCH_NAMES.get(name.removeprefix("torch."))
        if known is None:
            raise UsageError(f"arrays of dtype {name} have no counterpart in Plait's types")
        return TensorType(DTYPES[known], shape)
    try:
        return TensorType(dtype_of(x.dtype), shape)
    except (KeyError, TypeError):
        raise UsageError(f"arrays of dtype {name} have no counterpart in Plait's types") from None


def to_numpy(x: Any) -> Array:
    """The content of an array of torch, JAX or NumPy, or of a Python number, as a NumPy array.

    bf16 and f8 come as the ml_dtypes types. Arrays on a device are copied to the host; the caller's array is not
    changed, and the result may share its memory.
    """
    if not is_torch(x):
        return np.asarray(x)
    tensor = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    kind = array_type(tensor)
    if kind.dtype.numpy.isbuiltin == 1:
        return np.asarray(tensor.numpy())
    bits = {1: "uint8", 2: "int16"}[kind.dtype.itemsize]
    torch = sys.modules["torch"]  # loaded, or there were no tensor
    raw = tensor.reshape(-1).view(getattr(torch, bits)).numpy()
    return np.asarray(raw).view(kind.dtype.numpy).reshape(kind.shape)
