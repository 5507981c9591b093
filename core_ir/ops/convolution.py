"""Convolution and its two gradients: `x [N, C_in, *spatial]`, `w [C_out, C_in / groups, *kernel]`.

All three are one matrix product with the patches of x that the kernel covers. The gradients are
ops of their own, so that a backward can be split.
"""

import math
from collections.abc import Sequence

import numpy as np

from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    Op,
    Run,
    Types,
    int_attr,
    ints_attr,
    pairs_attr,
)
from plait.core_ir.ops.linalg import wide
from plait.core_ir.types import TensorType

Dims = tuple[int, ...]
Padding = tuple[tuple[int, int], ...]

_WINDOW = (
    "x is [N, C_in, *spatial] and w is [C_out, C_in / groups, *kernel], with 1 to 3 spatial "
    "dimensions",
    "the operands have one dtype, not bool",
    "strides, padding (low, high) and dilations have one entry for each spatial dimension; strides "
    "and dilations are positive",
    "groups divides C_in and C_out",
    "the kernel has at least one element in each spatial dimension",
)


def _padded(size: int, pad: tuple[int, int], dilation: int = 1) -> int:
    """Size of a dimension after dilation and padding; below 0 where cropped beyond its end."""
    return ((size - 1) * dilation + 1 if size else 0) + sum(pad)


def _result_spatial(spatial: Dims, kernel: Dims, attrs: Attrs) -> Dims:
    """Sizes of a convolution's spatial dimensions: 0 where the window does not fit."""
    lhs_dilation = attrs.get("lhs_dilation", (1,) * len(spatial))
    window = ((k - 1) * d + 1 for k, d in zip(kernel, attrs["rhs_dilation"], strict=True))
    sizes = map(_padded, spatial, attrs["padding"], lhs_dilation)
    return tuple(
        max((size - covered) // stride + 1, 0)
        for size, covered, stride in zip(sizes, window, attrs["strides"], strict=True)
    )


def _require_window(op: Op, x: TensorType, w: TensorType, attrs: Attrs) -> None:
    """Constraints 1 to 5, which the three ops share."""
    op.require(1, x.rank == w.rank and 3 <= x.rank <= 5, (x, w))
    op.require(2, x.dtype == w.dtype and x.dtype.kind != "bool", (x, w))
    num_spatial, groups = x.rank - 2, attrs["groups"]
    steps = [attrs[name] for name in ("strides", "lhs_dilation", "rhs_dilation") if name in attrs]
    positive = all(len(s) == num_spatial and all(n > 0 for n in s) for s in steps)
    padding = attrs["padding"]
    paired = len(padding) == num_spatial and all(len(p) == 2 for p in padding)
    op.require(3, positive and paired, (dict(attrs), x))
    op.require(4, groups > 0 and x.shape[1] == w.shape[1] * groups, (groups, x, w))
    op.require(4, w.shape[0] % groups == 0, (groups, w))
    op.require(5, all(k > 0 for k in w.shape[2:]), w)


def _pad(x: Array, padding: Padding) -> Array:
    """x with zeros around its spatial dimensions; negative padding crops."""
    whole = ((0, 0), (0, 0), *padding)
    grown = np.pad(x, [(max(lo, 0), max(hi, 0)) for lo, hi in whole])
    return grown[tuple(slice(max(-lo, 0), min(hi, 0) or None) for lo, hi in whole)]


def _dilate(x: Array, dilation: Dims) -> Array:
    """x with `dilation - 1` zeros between its elements along each spatial dimension."""
    sizes = [_padded(n, (0, 0), d) for n, d in zip(x.shape[2:], dilation, strict=True)]
    result = np.zeros((*x.shape[:2], *sizes), x.dtype)
    result[tuple(slice(None, None, d) for d in (1, 1, *dilation))] = x
    return result


def _patches(x: Array, kernel: Dims, spatial: Dims, attrs: Attrs) -> Array:
    """What the kernel covers, as a view of x: `[groups, C / groups, *kernel, N, *result]`."""
    groups = attrs["groups"]
    num, per_group = x.shape[0], x.shape[1] // groups
    row, channel, *steps = x.strides
    inner = [s * d for s, d in zip(steps, attrs["rhs_dilation"], strict=True)]
    outer = [s * d for s, d in zip(steps, attrs["strides"], strict=True)]
    return np.lib.stride_tricks.as_strided(
        x,
        (groups, per_group, *kernel, num, *spatial),
        (channel * per_group, channel, *inner, row, *outer),
    )


def _by_group(y: Array, groups: int) -> Array:
    """`[N, C, *spatial]` as a matrix for each group: `[groups, C / groups, N * spatial]`."""
    rows = y.shape[1] // groups
    return np.moveaxis(y, 0, 1).reshape(groups, rows, y.shape[0] * math.prod(y.shape[2:]))


def _convolve(x: Array, w: Array, attrs: Attrs) -> Array:
    kernel, groups = w.shape[2:], attrs["groups"]
    spatial = _result_spatial(x.shape[2:], kernel, attrs)
    shape = (x.shape[0], w.shape[0], *spatial)
    if 0 in shape or 0 in x.shape[1:2]:
        return np.zeros(shape, x.dtype)
    padded = _pad(_dilate(x, attrs["lhs_dilation"]), attrs["padding"])
    depth = math.prod(w.shape[1:])
    patches = _patches(padded, kernel, spatial, attrs).reshape(groups, depth, -1)
    product = np.matmul(w.reshape(groups, -1, depth), patches)
    return np.moveaxis(product.reshape(w.shape[0], x.shape[0], *spatial), 0, 1)


def _convolution_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w = types
    _require_window(convolution, x, w, attrs)
    batch_groups = attrs.get("batch_groups", 1)
    divides = batch_groups > 0 and not x.shape[0] % batch_groups and not w.shape[0] % batch_groups
    convolution.require(6, divides, (batch_groups, x, w))
    convolution.require(
        6, batch_groups == 1 or attrs["groups"] == 1, (batch_groups, attrs["groups"])
    )
    spatial = _result_spatial(x.shape[2:], w.shape[2:], attrs)
    return (x.with_shape((x.shape[0] // batch_groups, w.shape[0], *spatial)),)


def _convolution_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    x, w = (wide(y) for y in operands)
    batch_groups = attrs.get("batch_groups", 1)
    if batch_groups > 1:
        # Groups of the batch become groups of channels.
        parts = x.reshape(batch_groups, -1, *x.shape[1:])
        x = np.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1, *x.shape[2:])
        attrs = {**attrs, "groups": batch_groups}
    with np.errstate(all="ignore"):
        return (_convolve(x, w, attrs).astype(operands[0].dtype),)


def _product_flops(result: TensorType, w: Dims) -> int:
    """Of a convolution with this result: each element is a sum over one kernel."""
    return 2 * result.size * math.prod(w[1:])


convolution = Op(
    "convolution",
    _convolution_infer,
    _convolution_evaluate,
    2,
    (
        ints_attr("strides"),
        pairs_attr("padding"),
        ints_attr("lhs_dilation"),
        ints_attr("rhs_dilation"),
        int_attr("groups"),
        int_attr("batch_groups", optional=True),
    ),
    (
        *_WINDOW,
        "batch_groups divides N and C_out, and not both it and groups are more than 1",
        "padding may be negative (it crops, after lhs_dilation); where the window does not fit the "
        "result has size 0",
    ),
    flops=lambda types, attrs, results: _product_flops(results[0], types[1].shape),
    doc="(x, w) -> [N / batch_groups, C_out, *spatial]: cross-correlation. lhs_dilation puts zeros "
    "between the elements of x, rhs_dilation between those of w. Channels are cut into `groups` "
    "that see each other only; with batch_groups, part g of C_out sees part g of the batch.",
)

_GRADIENT_ATTRS: tuple[Attr, ...] = (
    ints_attr("strides"),
    pairs_attr("padding"),
    ints_attr("rhs_dilation"),
    int_attr("groups"),
)


def _require_gradient(op: Op, x: TensorType, w: TensorType, grad: TensorType, attrs: Attrs) -> None:
    _require_window(op, x, w, attrs)
    spatial = _result_spatial(x.shape[2:], w.shape[2:], attrs)
    expected = x.with_shape((x.shape[0], w.shape[0], *spatial))
    op.require(6, grad == expected, f"{grad} for {expected}")


def _input_grad_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    grad, w = types
    spatial = attrs["input_spatial"]
    convolution_input_grad.require(
        1,
        grad.rank == w.rank == len(spatial) + 2 and all(n >= 0 for n in spatial),
        (grad, w, spatial),
    )
    x = grad.with_shape((grad.shape[0], w.shape[1] * attrs["groups"], *spatial))
    _require_gradient(convolution_input_grad, x, w, grad, attrs)
    return (x,)


def _input_grad_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    grad, w = (wide(y) for y in operands)
    kernel, groups, padding = w.shape[2:], attrs["groups"], attrs["padding"]
    spatial, per_group = grad.shape[2:], w.shape[1]
    shape = (grad.shape[0], per_group * groups)
    if 0 in grad.shape or 0 in shape:
        return (np.zeros((*shape, *attrs["input_spatial"]), operands[0].dtype),)
    sizes = map(_padded, attrs["input_spatial"], padding)
    padded = np.zeros((*shape, *sizes), grad.dtype)
    depth = math.prod(w.shape[1:])
    transposed = np.swapaxes(w.reshape(groups, -1, depth), 1, 2)
    with np.errstate(all="ignore"):
        product = np.matmul(transposed, _by_group(grad, groups))
        product = product.reshape(groups, per_group, *kernel, grad.shape[0], *spatial)
        patches = _patches(padded, kernel, spatial, attrs)
        for position in np.ndindex(*kernel):  # places of one kernel element never coincide
            patches[:, :, *position] += product[:, :, *position]
        result = _pad(padded, tuple((-lo, -hi) for lo, hi in padding))
        return (result.astype(operands[0].dtype),)


convolution_input_grad = Op(
    "convolution_input_grad",
    _input_grad_infer,
    _input_grad_evaluate,
    2,
    (ints_attr("input_spatial"), *_GRADIENT_ATTRS),
    (*_WINDOW, "grad has the type of the convolution's result"),
    flops=lambda types, attrs, results: _product_flops(types[0], types[1].shape),
    doc="(grad, w) -> [N, C_in, *input_spatial]: the transpose, in x, of a convolution with "
    "lhs_dilation 1 (without conjugation).",
)


def _weight_grad_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, grad = types
    groups, kernel = attrs["groups"], attrs["kernel_spatial"]
    op = convolution_weight_grad
    op.require(
        1, x.rank == grad.rank == len(kernel) + 2 and all(k >= 0 for k in kernel), (x, grad, kernel)
    )
    op.require(2, x.dtype == grad.dtype, (x, grad))
    op.require(4, groups > 0 and x.shape[1] % groups == 0, (groups, x))
    w = x.with_shape((grad.shape[1], x.shape[1] // groups, *kernel))
    _require_gradient(op, x, w, grad, attrs)
    return (w,)


def _weight_grad_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    x, grad = (wide(y) for y in operands)
    kernel, groups = attrs["kernel_spatial"], attrs["groups"]
    shape = (grad.shape[1], x.shape[1] // groups, *kernel)
    if 0 in grad.shape or 0 in shape:
        return (np.zeros(shape, operands[0].dtype),)
    patches = _patches(_pad(x, attrs["padding"]), kernel, grad.shape[2:], attrs)
    patches = patches.reshape(groups, math.prod(shape[1:]), -1)
    with np.errstate(all="ignore"):
        product = np.matmul(_by_group(grad, groups), np.swapaxes(patches, 1, 2))
        return (product.reshape(shape).astype(operands[0].dtype),)


convolution_weight_grad = Op(
    "convolution_weight_grad",
    _weight_grad_infer,
    _weight_grad_evaluate,
    2,
    (ints_attr("kernel_spatial"), *_GRADIENT_ATTRS),
    (*_WINDOW, "grad has the type of the convolution's result"),
    flops=lambda types, attrs, results: _product_flops(types[1], results[0].shape),
    doc="(x, grad) -> [C_out, C_in / groups, *kernel_spatial]: the transpose, in w, of a "
    "convolution with lhs_dilation 1 (without conjugation).",
)

FAMILY: tuple[Op, ...] = (convolution, convolution_input_grad, convolution_weight_grad)
