"""Lowering rules: matrix products, convolutions, Cholesky factors and triangular systems."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.ops import convolution, elementwise, reduce, shape
from plait.core_ir.ops import linalg as ops
from plait.core_ir.types import TensorType, i32
from plait.frontends.jax.lower_extern import extern
from plait.frontends.jax.site import Rule, Site, ints, pairs


def _dot_general(b: Builder, site: Site, x: Value, y: Value) -> Value:
    contract, batch = site.params["dimension_numbers"]
    wanted = site.result.dtype
    dtype = x.type.dtype
    if dtype != y.type.dtype or dtype.kind != wanted.kind or dtype.kind == "bool":
        x, y, dtype = b.convert(x, wanted), b.convert(y, wanted), wanted
    attrs = {"batch": pairs(batch), "contract": pairs(contract)}
    if wanted == dtype:
        return b(ops.dot_general, x, y, **attrs)
    if wanted.itemsize > dtype.itemsize:
        return b(ops.dot_general, x, y, dtype=wanted, **attrs)
    return b.convert(b(ops.dot_general, x, y, **attrs), wanted)


def _conv_general_dilated(b: Builder, site: Site, x: Value, w: Value) -> Value:
    p = site.params
    dims = p["dimension_numbers"]
    wanted = site.result.dtype
    x, w = b.convert(x, wanted), b.convert(w, wanted)
    attrs = {"batch_groups": int(p["batch_group_count"])} if p["batch_group_count"] != 1 else {}
    y = b(
        convolution.convolution,
        b.transpose(x, ints(dims.lhs_spec)),
        b.transpose(w, ints(dims.rhs_spec)),
        strides=ints(p["window_strides"]),
        padding=pairs(p["padding"]),
        lhs_dilation=ints(p["lhs_dilation"]),
        rhs_dilation=ints(p["rhs_dilation"]),
        groups=int(p["feature_group_count"]),
        **attrs,
    )
    # out_spec says where the dimensions of NC+spatial stand; the permutation is its inverse.
    out_spec = ints(dims.out_spec)
    return b.transpose(y, tuple(out_spec.index(d) for d in range(len(out_spec))))


def _ragged_dot_general(
    b: Builder, site: Site, x: Value, y: Value, group_sizes: Value
) -> Value | Sequence[Value]:
    """Rows in groups times a matrix for each group; or the gradient of those matrices."""
    p = site.params
    numbers = p["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    ragged, groups = ints(numbers.lhs_ragged_dimensions), ints(numbers.rhs_group_dimensions)
    x, y = b.convert(x, site.result.dtype), b.convert(y, site.result.dtype)
    known = ragged == (0,) and p["group_offset"] is None and not any(batch)
    if known and x.type.rank == 2 and group_sizes.type.dtype == i32:
        if groups == (0,) and y.type.rank == 3 and pairs(contract)[0] == (1,):
            (k,) = ints(contract[1])
            return b(ops.grouped_matmul, x, b.transpose(y, (0, k, 3 - k)), group_sizes)
        if groups == () and y.type.rank == 2 and pairs(contract) == ((0,), (0,)):
            return _grouped_outer(b, x, y, group_sizes)
    return extern(b, site, x, y, group_sizes)


def _grouped_outer(b: Builder, x: Value, y: Value, group_sizes: Value) -> Value:
    """f[m, k], f[m, n], i32[g] -> f[g, k, n]: the sum of x^T y over the rows of each group."""
    (num_rows, depth), (num_groups,) = x.type.shape, group_sizes.type.shape
    table = (num_groups, num_rows)
    row = b(shape.iota, dtype=i32, shape=table, dim=1)
    end = b(reduce.cumsum, group_sizes, dim=0, reverse=False)
    start = b(elementwise.sub, end, group_sizes)
    after = b(elementwise.compare, row, b.expand(start, table, (0,)), direction="ge")
    before = b(elementwise.compare, row, b.expand(end, table, (0,)), direction="lt")
    inside = b(elementwise.and_, after, before)
    grouped = (num_groups, num_rows, depth)
    mine = b(
        elementwise.select,
        b.expand(inside, grouped, (0, 1)),
        b.expand(x, grouped, (1, 2)),
        b.full(TensorType(x.type.dtype, grouped), 0),
    )
    return b(ops.dot_general, mine, y, batch=((), ()), contract=((1,), (0,)))


def _cholesky(b: Builder, site: Site, x: Value) -> Value:
    return b(ops.cholesky, x, lower=True)


def _triangular_solve(b: Builder, site: Site, a: Value, rhs: Value) -> Value:
    names = ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
    return b(ops.triangular_solve, a, rhs, **{n: bool(site.params[n]) for n in names})


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "dot_general": _dot_general,
        "conv_general_dilated": _conv_general_dilated,
        "ragged_dot_general": _ragged_dot_general,
        "cholesky": _cholesky,
        "triangular_solve": _triangular_solve,
    }
)
