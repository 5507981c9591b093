"""Emitters of matrix products, Cholesky factors and triangular systems.

Products become mm, or bmm with batch dimensions; dimensions are permuted as views, which BLAS reads as they lie.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.backends.torch.carriers import wrap
from plait.backends.torch.emit_shape import permuted, reshaped
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.ops import linalg as ops
from plait.core_ir.types import bf16, f16, f32


def _sizes(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [x.shape[d] for d in dims]


def _dot_general(call: Call, a: Tensor, b: Tensor) -> Tensor:
    (batch_a, batch_b), (contract_a, contract_b) = call.attrs["batch"], call.attrs["contract"]
    result = call.result
    if a.dtype in (torch.float16, torch.bfloat16) and result.dtype != call.dtype:
        a, b = (
            a.to(torch.float32),
            b.to(torch.float32),
        )  # products of narrow floats are exact in f32
    if call.dtype.is_integer and result.dtype != call.dtype:
        a, b = wrap(a, result.dtype), wrap(b, result.dtype)
    free_a = [d for d in range(a.dim()) if d not in batch_a and d not in contract_a]
    free_b = [d for d in range(b.dim()) if d not in batch_b and d not in contract_b]
    rows, columns = math.prod(_sizes(a, free_a)), math.prod(_sizes(b, free_b))
    depth, num_batch = math.prod(_sizes(a, contract_a)), math.prod(_sizes(a, batch_a))
    left = permuted(a, (*batch_a, *free_a, *contract_a))
    right = permuted(b, (*batch_b, *contract_b, *free_b))
    if batch_a:
        left = reshaped(left, (num_batch, rows, depth))
        product = _bmm(left, reshaped(right, (num_batch, depth, columns)))
    else:
        product = _mm(reshaped(left, (rows, depth)), reshaped(right, (depth, columns)))
    return reshaped(wrap(product, result.dtype), result.shape)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and not (a.is_floating_point() or a.is_complex()):
        return (a.unsqueeze(-1) * b.unsqueeze(0)).sum(1, dtype=a.dtype)  # cuBLAS has no integers
    return torch.mm(a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and not (a.is_floating_point() or a.is_complex()):
        return (a.unsqueeze(-1) * b.unsqueeze(1)).sum(2, dtype=a.dtype)
    return torch.bmm(a, b)


def _grouped_matmul(call: Call, x: Tensor, w: Tensor, group_sizes: Tensor) -> Tensor:
    ends = torch.cumsum(torch.clamp(group_sizes, min=0), 0, dtype=torch.int32)
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    if call.result.size == 0 or x.shape[1] == 0 or w.shape[0] == 0:
        return x.new_zeros(call.result.shape)
    if _has_kernel(call):
        product = torch.ops.aten._grouped_mm(x, w, ends)
        return torch.where(
            (rows < ends.select(0, -1)).unsqueeze(1), product, 0
        )  # it leaves the rest unset
    group = torch.searchsorted(ends, rows, right=True).unsqueeze(1)
    out = torch.zeros(call.result.shape, dtype=w.dtype, device=x.device)
    for number in range(w.shape[0]):
        out = torch.where(group == number, _mm(x, w.select(0, number)), out)
    return wrap(out, call.dtype)


def _has_kernel(call: Call) -> bool:
    """Whether torch has a grouped product: on the CPU of f32 and narrower, on CUDA of bf16; rows of 16 bytes."""
    dtypes = (bf16,) if call.device.type == "cuda" else (bf16, f16, f32)
    x, w = call.type(0), call.type(1)
    aligned = all(n * x.dtype.itemsize % 16 == 0 for n in (x.shape[1], w.shape[2]))
    return x.dtype in dtypes and aligned


def _cholesky(call: Call, x: Tensor) -> Tensor:
    lower = call.attrs["lower"]
    factor, info = torch.linalg.cholesky_ex(x if lower else x.mH)  # reads the lower triangle
    factor = torch.where((info == 0).unsqueeze(-1).unsqueeze(-1), factor, torch.nan).tril()
    return factor if lower else factor.mH.resolve_conj()


def _triangular_solve(call: Call, a: Tensor, b: Tensor) -> Tensor:
    attrs, upper = call.attrs, not call.attrs["lower"]
    if attrs["conjugate_a"] and a.is_complex():
        a = torch.conj_physical(a)
    if attrs["transpose_a"]:
        a, upper = a.mT, not upper
    x: Tensor = torch.linalg.solve_triangular(
        a, b, upper=upper, left=attrs["left_side"], unitriangular=attrs["unit_diagonal"]
    )
    return x


EMITTERS: Table = {
    ops.dot_general: _dot_general,
    ops.grouped_matmul: _grouped_matmul,
    ops.cholesky: _cholesky,
    ops.triangular_solve: _triangular_solve,
}
