"""Lowering of matrix and vector products."""

from collections.abc import Sequence
from typing import Any

import torch

from plait.core_ir.graph import Value
from plait.core_ir.ops import elementwise as ew
from plait.core_ir.ops import linalg as la
from plait.core_ir.ops import reduce as rd
from plait.frontends.torch.dtypes import compute_dtype
from plait.frontends.torch.rules import Number, Rules, Site, broadcast_shapes

aten = torch.ops.aten


def dot(
    s: Site, x: Value, y: Value, contract: tuple[int, int], batch: int = 0, **attrs: Any
) -> Value:
    """x . y over one dim each; the first `batch` dims are paired."""
    paired = tuple(range(batch))
    dims = ((contract[0],), (contract[1],))
    return s(la.dot_general, x, y, batch=(paired, paired), contract=dims, **attrs)


def mm(s: Site, x: Value, y: Value) -> Value:
    return dot(s, x, y, (1, 0))


def bmm(s: Site, x: Value, y: Value) -> Value:
    return dot(s, x, y, (2, 1), batch=1)


def mv(s: Site, x: Value, y: Value) -> Value:
    return dot(s, x, y, (1, 0))


def vector_dot(s: Site, x: Value, y: Value) -> Value:
    return dot(s, x, y, (0, 0))


def _plus(s: Site, bias: Value, product: Value, beta: Number, alpha: Number) -> Value:
    """beta * bias + alpha * product, rounded once to the result's dtype."""
    if alpha != 1:
        product = s.mul(product, alpha)
    if beta == 0:
        return s.b.convert(product, s.type.dtype)
    bias = s.b.convert(bias, product.type.dtype)
    return s.b.convert(s.add(product, bias if beta == 1 else s.mul(bias, beta)), s.type.dtype)


def _wide(x: Value) -> dict[str, Any]:
    wide = compute_dtype(x.type.dtype)
    return {} if wide == x.type.dtype else {"dtype": wide}


def addmm(
    s: Site, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1
) -> Value:
    return _plus(s, bias, dot(s, x, y, (1, 0), **_wide(x)), beta, alpha)


def addmv(
    s: Site, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1
) -> Value:
    return _plus(s, bias, dot(s, x, y, (1, 0), **_wide(x)), beta, alpha)


def baddbmm(
    s: Site, bias: Value, x: Value, y: Value, *, beta: Number = 1, alpha: Number = 1
) -> Value:
    return _plus(s, bias, dot(s, x, y, (2, 1), batch=1, **_wide(x)), beta, alpha)


def trilinear(
    s: Site,
    a: Value,
    b: Value,
    c: Value,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    sum_dims: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """The product of three tensors, each given new dims, summed over some: what bilinear layers compute."""
    lifted = [_with_dims(s, x, dims) for x, dims in ((a, expand_a), (b, expand_b), (c, expand_c))]
    shape = broadcast_shapes(*(x.type.shape for x in lifted))
    a, b, c = (s.b.expand(x, shape) for x in lifted)
    return s(rd.reduce_sum, s(ew.mul, s(ew.mul, a, b), c), dims=tuple(sorted(sum_dims)))


def _with_dims(s: Site, x: Value, dims: Sequence[int]) -> Value:
    sizes = iter(x.type.shape)
    rank = x.type.rank + len(dims)
    return s.b.reshape(x, [1 if d in dims else next(sizes) for d in range(rank)])


RULES: Rules = {
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.mv.default: mv,
    aten._trilinear.default: trilinear,
    aten.dot.default: vector_dot,
    aten.addmm.default: addmm,
    aten.addmv.default: addmv,
    aten.baddbmm.default: baddbmm,
}
