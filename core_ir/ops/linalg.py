"""Linear algebra: general and grouped matrix products, Cholesky factors, triangular systems.

Products of f16, bf16 and f8 are accumulated in f32 and rounded once.
"""

import math
from collections.abc import Sequence

import numpy as np

from plait.core_ir.op import Array, Attrs, Op, Run, Types, bool_attr, dtype_attr, pairs_attr
from plait.core_ir.types import TensorType, c64, c128, dtype_of, f32, f64, i32

Dims = tuple[int, ...]


def wide(x: Array) -> Array:
    """x in the dtype its products are accumulated in: f32 for the narrower floats, else its own."""
    narrow = dtype_of(x.dtype).kind == "float" and x.dtype.itemsize < 4
    return x.astype(np.float32) if narrow else x


def _free(shape: Dims, batch: Dims, contract: Dims) -> Dims:
    """Dimensions that are neither batch nor contracted."""
    return tuple(d for d in range(len(shape)) if d not in batch and d not in contract)


def _sizes(shape: Dims, dims: Dims) -> Dims:
    return tuple(shape[d] for d in dims)


def _dot_general_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = types
    dot_general.require(1, a.dtype == b.dtype and a.dtype.kind != "bool", (a, b))
    batch, contract = attrs["batch"], attrs["contract"]
    dot_general.require(2, len(batch) == 2 and len(contract) == 2, (batch, contract))
    dot_general.require(
        2,
        len(batch[0]) == len(batch[1]) and len(contract[0]) == len(contract[1]),
        (batch, contract),
    )
    for x, own in zip((a, b), zip(batch, contract, strict=True), strict=True):
        dims = own[0] + own[1]
        distinct = len(set(dims)) == len(dims) and all(0 <= d < x.rank for d in dims)
        dot_general.require(3, distinct, (dims, x))
    for pair in (batch, contract):
        dot_general.require(4, _sizes(a.shape, pair[0]) == _sizes(b.shape, pair[1]), (a, b, pair))
    dtype = attrs.get("dtype", a.dtype)
    wider = dtype.kind == a.dtype.kind and dtype.itemsize >= a.dtype.itemsize
    dot_general.require(5, wider, (a, dtype))
    shape = _sizes(a.shape, batch[0])
    for x, i in ((a, 0), (b, 1)):
        shape += _sizes(x.shape, _free(x.shape, batch[i], contract[i]))
    return (TensorType(dtype, shape),)


def _dot_general_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    a, b = operands
    batch, contract = attrs["batch"], attrs["contract"]
    dtype = attrs["dtype"].numpy if "dtype" in attrs else a.dtype
    free_a, free_b = (_free(x.shape, batch[i], contract[i]) for i, x in enumerate((a, b)))
    shape = _sizes(a.shape, batch[0]), _sizes(a.shape, free_a), _sizes(b.shape, free_b)
    num_batch, rows, columns = (math.prod(s) for s in shape)
    depth = math.prod(_sizes(a.shape, contract[0]))
    left = np.transpose(a, batch[0] + free_a + contract[0]).reshape(num_batch, rows, depth)
    right = np.transpose(b, batch[1] + contract[1] + free_b).reshape(num_batch, depth, columns)
    compute = np.result_type(wide(left[:0]).dtype, wide(np.empty(0, dtype)).dtype)
    with np.errstate(all="ignore"):
        product = np.matmul(left.astype(compute), right.astype(compute))
        return (product.astype(dtype).reshape(sum(shape, ())),)


def _dot_general_flops(types: Types, attrs: Attrs, results: Types) -> int:
    return 2 * results[0].size * math.prod(_sizes(types[0].shape, attrs["contract"][0]))


dot_general = Op(
    "dot_general",
    _dot_general_infer,
    _dot_general_evaluate,
    2,
    (pairs_attr("batch"), pairs_attr("contract"), dtype_attr(optional=True)),
    (
        "a and b have one dtype, not bool",
        "batch and contract each are two tuples of equal length: dimensions of a, dimensions of b",
        "batch and contract dimensions of one operand are in range, none twice",
        "paired dimensions have equal sizes",
        "dtype is of the operands' kind and at least as wide",
    ),
    flops=_dot_general_flops,
    doc="(a, b) -> products summed over the contract dimensions, one for each index of the batch "
    "dimensions. Dimensions of the result: batch, other dimensions of a, other dimensions of b. "
    "dtype is the result's, by default the operands'.",
)


def _grouped_matmul_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, w, group_sizes = types
    grouped_matmul.require(1, (x.rank, w.rank) == (2, 3), (x, w))
    grouped_matmul.require(2, x.dtype == w.dtype and x.dtype.kind != "bool", (x, w))
    grouped_matmul.require(3, x.shape[1] == w.shape[1], (x, w))
    grouped_matmul.require(4, group_sizes == TensorType(i32, (w.shape[0],)), (group_sizes, w))
    return (x.with_shape((x.shape[0], w.shape[2])),)


def _grouped_matmul_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    x, w, group_sizes = operands
    result = np.zeros((x.shape[0], w.shape[2]), x.dtype)
    start = 0
    with np.errstate(all="ignore"):
        for size, weight in zip(group_sizes, wide(w), strict=True):
            rows = slice(start, start + max(int(size), 0))
            result[rows] = np.matmul(wide(x[rows]), weight).astype(x.dtype)
            start = rows.stop
    return (result,)


grouped_matmul = Op(
    "grouped_matmul",
    _grouped_matmul_infer,
    _grouped_matmul_evaluate,
    3,
    (),
    (
        "x is [m, k] and w is [g, k, n]",
        "x and w have one dtype, not bool",
        "x and w have the same k",
        "group_sizes is i32[g]",
        "the first group_sizes[0] rows of x belong to group 0, the next to group 1, and so on; "
        "rows beyond the sum are 0 in the result; a negative size counts as 0",
    ),
    flops=lambda types, attrs, results: 2 * types[0].size * types[1].shape[2],
    doc="(x, w, group_sizes) -> [m, n]: each row of x times the matrix of its group.",
)

_FACTORED = (f32, f64, c64, c128)


def _cholesky_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    (x,) = types
    cholesky.require(1, x.dtype in _FACTORED, x)
    cholesky.require(2, x.rank >= 2 and x.shape[-1] == x.shape[-2], x)
    return (x,)


def _cholesky_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    (x,) = operands
    triangle = np.tril if attrs["lower"] else np.triu
    factors = np.empty(x.shape, x.dtype)
    for i in np.ndindex(*x.shape[:-2]):
        try:
            factors[i] = np.linalg.cholesky(x[i], upper=not attrs["lower"])
        except np.linalg.LinAlgError:
            factors[i] = np.nan
    return (triangle(factors),)


def _per_matrix(types: Types) -> tuple[int, int]:
    """How many square matrices the first operand holds, and their size."""
    return math.prod(types[0].shape[:-2]), types[0].shape[-1]


def _cholesky_flops(types: Types, attrs: Attrs, results: Types) -> int:
    num_matrices, n = _per_matrix(types)
    return num_matrices * n**3 // 3


cholesky = Op(
    "cholesky",
    _cholesky_infer,
    _cholesky_evaluate,
    1,
    (bool_attr("lower"),),
    (
        "x is f32, f64, c64 or c128",
        "x is [..., n, n]",
        "only the lower (lower=True) or the upper triangle of x is read; the rest of the matrix is "
        "taken from it by (Hermitian) symmetry",
        "the factor of a matrix that is not positive definite is NaN",
    ),
    flops=_cholesky_flops,
    doc="x -> L with x = L L^H (lower=True), or U with x = U^H U; the other triangle of the result "
    "is 0.",
)


def _triangular_solve_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    a, b = types
    triangular_solve.require(1, a.dtype in _FACTORED and a.dtype == b.dtype, (a, b))
    square = a.rank >= 2 and a.shape[-1] == a.shape[-2]
    triangular_solve.require(2, square, a)
    triangular_solve.require(3, a.rank == b.rank and a.shape[:-2] == b.shape[:-2], (a, b))
    size = b.shape[-2] if attrs["left_side"] else b.shape[-1]
    triangular_solve.require(4, size == a.shape[-1], (a, b))
    return (b,)


def _substitute(a: Array, b: Array, lower: bool, unit_diagonal: bool) -> Array:
    """The x of `a x = b`, row by row from the corner where one unknown stands alone."""
    n = a.shape[-1]
    x = b.copy()
    for i in range(n) if lower else reversed(range(n)):
        known = slice(0, i) if lower else slice(i + 1, n)
        x[..., i, :] -= np.matmul(a[..., i : i + 1, known], x[..., known, :])[..., 0, :]
        if not unit_diagonal:
            x[..., i, :] /= a[..., i, i, None]
    return x


def _triangular_solve_evaluate(
    operands: Sequence[Array], attrs: Attrs, run: Run
) -> Sequence[Array]:
    a, b = operands
    lower, left = attrs["lower"], attrs["left_side"]
    if attrs["conjugate_a"]:
        a = np.conj(a)
    # x op(a) = b is op(a)^T x^T = b^T: a is transposed where one of the two asks for it.
    if attrs["transpose_a"] == left:
        a, lower = np.swapaxes(a, -1, -2), not lower
    with np.errstate(all="ignore"):
        if left:
            return (_substitute(a, b, lower, attrs["unit_diagonal"]),)
        solved = _substitute(a, np.swapaxes(b, -1, -2), lower, attrs["unit_diagonal"])
    return (np.swapaxes(solved, -1, -2),)


triangular_solve = Op(
    "triangular_solve",
    _triangular_solve_infer,
    _triangular_solve_evaluate,
    2,
    tuple(
        bool_attr(name)
        for name in ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
    ),
    (
        "a and b have one dtype: f32, f64, c64 or c128",
        "a is [..., m, m]",
        "a and b have the same batch dimensions",
        "b is [..., m, n] (left_side=True) or [..., n, m]",
        "only the triangle of a that `lower` names is read; with unit_diagonal its diagonal is not "
        "read either and counts as 1",
    ),
    flops=lambda types, attrs, results: types[1].size * types[0].shape[-1],
    doc="(a, b) -> x with op(a) x = b (left_side=True) or x op(a) = b. op(a) is a, transposed with "
    "transpose_a and conjugated with conjugate_a; `lower` speaks of a before that. A singular a "
    "gives inf or NaN.",
)

FAMILY: tuple[Op, ...] = (dot_general, grouped_matmul, cholesky, triangular_solve)
