"""Emitters of matrix products, factors and convolutions: full precision, narrow floats accumulated in f32."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from plait.backends.jax.rule import Table, cast, is_narrow, one
from plait.core_ir.ops import convolution as conv_ops
from plait.core_ir.ops import linalg as ops
from plait.core_ir.types import DType

Ints = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]
TwoDims = tuple[Ints, Ints]

FULL = lax.Precision.HIGHEST
"""No reduced mode (TF32, bf16 passes) for f32 products, whatever the process's default is."""


def _bf16(x: jax.Array) -> jax.Array:
    """f8 as bf16, which holds it exactly and which every platform multiplies."""
    return cast(x, np.dtype(jax.numpy.bfloat16)) if x.dtype.itemsize == 1 and is_narrow(x) else x


def _accumulator(x: jax.Array) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if is_narrow(x) else x.dtype


def _dot_general(
    a: jax.Array, b: jax.Array, *, batch: TwoDims, contract: TwoDims, dtype: DType | None = None
) -> jax.Array:
    wanted = a.dtype if dtype is None else dtype.numpy
    accumulated = max(_accumulator(a), wanted, key=lambda d: d.itemsize)
    numbers = ((contract[0], contract[1]), (batch[0], batch[1]))
    product = lax.dot_general(
        _bf16(a), _bf16(b), numbers, precision=FULL, preferred_element_type=accumulated
    )
    return cast(product, wanted)


def _grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    sizes = lax.max(group_sizes, lax.full_like(group_sizes, 0))
    product = lax.ragged_dot(
        _bf16(x), _bf16(w), sizes, precision=FULL, preferred_element_type=_accumulator(x)
    )
    return cast(product, x.dtype)


def _adjoint(x: jax.Array) -> jax.Array:
    turned = lax.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))
    return lax.conj(turned) if np.issubdtype(x.dtype, np.complexfloating) else turned


def _cholesky(x: jax.Array, *, lower: bool) -> jax.Array:
    source = x if lower else _adjoint(x)
    factor = lax.linalg.cholesky(source, symmetrize_input=False)
    return factor if lower else _adjoint(factor)


def _triangular_solve(a: jax.Array, b: jax.Array, **attrs: bool) -> jax.Array:
    return lax.linalg.triangular_solve(a, b, **attrs)


# Convolutions.


def _convolve(
    x: jax.Array,
    w: jax.Array,
    *,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    groups: int = 1,
    batch_groups: int = 1,
    swapped: bool = False,
) -> jax.Array:
    """`swapped`: the first two dimensions of x, w and the result stand the other way round."""
    rank = x.ndim
    spec = (1, 0, *range(2, rank)) if swapped else tuple(range(rank))
    out = lax.conv_general_dilated(
        _bf16(x),
        _bf16(w),
        strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        lax.ConvDimensionNumbers(spec, spec, spec),
        feature_group_count=groups,
        batch_group_count=batch_groups,
        precision=FULL,
        preferred_element_type=_accumulator(x),
    )
    return cast(out, x.dtype)


def _convolution(
    x: jax.Array,
    w: jax.Array,
    *,
    strides: Ints,
    padding: Pairs,
    lhs_dilation: Ints,
    rhs_dilation: Ints,
    groups: int,
    batch_groups: int = 1,
) -> jax.Array:
    return _convolve(
        x,
        w,
        strides=strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        groups=groups,
        batch_groups=batch_groups,
    )


def _spread(size: int, step: int) -> int:
    """Size with `step - 1` places between its elements."""
    return (size - 1) * step + 1 if size else 0


def _input_grad(
    grad: jax.Array,
    w: jax.Array,
    *,
    input_spatial: Ints,
    strides: Ints,
    padding: Pairs,
    rhs_dilation: Ints,
    groups: int,
) -> jax.Array:
    """A convolution of the spread gradient with the kernel reversed and its channels exchanged."""
    if 0 in grad.shape or 0 in w.shape:
        shape = (grad.shape[0], w.shape[1] * groups, *input_spatial)
        return lax.full(shape, 0, grad.dtype)
    out_channels, in_per_group, *kernel = w.shape
    out_per_group = out_channels // groups
    turned = lax.rev(w, tuple(range(2, w.ndim)))
    turned = lax.reshape(turned, (groups, out_per_group, in_per_group, *kernel))
    turned = lax.transpose(turned, (0, 2, 1, *range(3, w.ndim + 1)))
    turned = lax.reshape(turned, (groups * in_per_group, out_per_group, *kernel))
    margins = []
    for size, result, k, stride, dilation, (low, _) in zip(
        input_spatial, grad.shape[2:], kernel, strides, rhs_dilation, padding, strict=True
    ):
        covered = _spread(k, dilation)
        before = covered - 1 - low
        margins.append((before, size + covered - 1 - _spread(result, stride) - before))
    return _convolve(
        grad,
        turned,
        strides=(1,) * len(kernel),
        padding=margins,
        lhs_dilation=strides,
        rhs_dilation=rhs_dilation,
        groups=groups,
    )


def _weight_grad(
    x: jax.Array,
    grad: jax.Array,
    *,
    kernel_spatial: Ints,
    strides: Ints,
    padding: Pairs,
    rhs_dilation: Ints,
    groups: int,
) -> jax.Array:
    """A convolution of x with the spread gradient, summed over the batch as if it were channels."""
    if 0 in grad.shape or 0 in x.shape:
        shape = (grad.shape[1], x.shape[1] // groups, *kernel_spatial)
        return lax.full(shape, 0, x.dtype)
    margins = []
    for k, size, result, stride, dilation, (low, _) in zip(
        kernel_spatial, x.shape[2:], grad.shape[2:], strides, rhs_dilation, padding, strict=True
    ):
        needed = _spread(result, stride) + (k - 1) * dilation
        margins.append((low, needed - size - low))
    return _convolve(
        x,
        grad,
        strides=rhs_dilation,
        padding=margins,
        lhs_dilation=(1,) * len(kernel_spatial),
        rhs_dilation=strides,
        batch_groups=groups,
        swapped=True,
    )


TABLE: Table = {
    ops.dot_general: one(_dot_general),
    ops.grouped_matmul: one(_grouped_matmul),
    ops.cholesky: one(_cholesky),
    ops.triangular_solve: one(_triangular_solve),
    conv_ops.convolution: one(_convolution),
    conv_ops.convolution_input_grad: one(_input_grad),
    conv_ops.convolution_weight_grad: one(_weight_grad),
}
