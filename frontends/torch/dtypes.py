"""Element types between torch and Plait, and torch's rule for promoting them."""

from typing import Any

import torch

from plait.core_ir.arrays import TORCH_NAMES, array_type
from plait.core_ir.graph import Value
from plait.core_ir.types import DTYPES, DType, TensorType, bf16, f16, f32

TO_TORCH: dict[DType, torch.dtype] = {
    DTYPES[ours]: getattr(torch, name) for name, ours in TORCH_NAMES.items()
}
FROM_TORCH = {dtype: plait for plait, dtype in TO_TORCH.items()}


def type_of(fake: torch.Tensor) -> TensorType:
    """The type of a (fake) tensor; UsageError for a dtype Plait does not have."""
    return array_type(fake)


def promote(*operands: Any) -> DType:
    """The dtype torch computes in for these operands: tensors by category and rank, numbers as numbers."""
    result: Any = None
    for operand in operands:
        other = _example(operand)
        result = other if result is None else _merged(result, other)
    return FROM_TORCH[result.dtype if isinstance(result, torch.Tensor) else _number_dtype(result)]


def compute_dtype(dtype: DType) -> DType:
    """The dtype in which torch computes inside one op: f32 for the 16-bit floats."""
    return f32 if dtype in (f16, bf16) else dtype


def integer_bounds(dtype: DType) -> tuple[int, int]:
    """The lowest and the highest number of an integer type."""
    bits = dtype.itemsize * 8
    return (
        (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype.kind == "signed" else (0, (1 << bits) - 1)
    )


def _example(operand: Any) -> Any:
    if not isinstance(operand, Value):
        return operand
    shape = (1,) if operand.type.rank else ()
    return torch.empty(shape, dtype=TO_TORCH[operand.type.dtype], device="meta")


def _merged(a: Any, b: Any) -> Any:
    dtype = torch.result_type(a, b)
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        return torch.empty((), dtype=dtype, device="meta")
    ranked = any(isinstance(x, torch.Tensor) and x.ndim for x in (a, b))
    return torch.empty((1,) if ranked else (), dtype=dtype, device="meta")


def _number_dtype(number: Any) -> torch.dtype:
    return torch.result_type(number, number)
