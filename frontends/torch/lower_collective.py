"""Lowering rules: torch's functional collectives, each a start with its wait behind it.

`wait_tensor` gives its operand: where waits stand is for passes to decide. One over a group along several axes is one
collective after the other.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.frontends.torch.groups import axes_of, size_of
from plait.frontends.torch.permute import PERMUTE
from plait.frontends.torch.rules import Rules, Site

c10d = torch.ops._c10d_functional
autograd = torch.ops._c10d_functional_autograd


Over: TypeAlias = list[dict[str, Any]]
"""The attributes that name an axis, for each axis of a group."""


def _over(s: Site, group: Any) -> Over:
    axes = axes_of(group, s.mesh, f"{s.b.source}: a collective")
    return [] if s.mesh is None else [{"axis": a, "size": s.mesh.axes[a]} for a in axes]


def _together(s: Site, op: Op, x: Value, over: Over, **attrs: Any) -> Value:
    for along in over:
        x = s(ops.wait, s(op, x, **along, **attrs))
    return x


def _reduce(s: Site, op: Op, x: Value, reduction: str, group: Any, **attrs: Any) -> Value:
    over = _over(s, group)
    if reduction != "avg":
        if reduction not in ops.REDUCTIONS:
            known = ", ".join(ops.REDUCTIONS)
            raise UnsupportedError(
                f"{s.b.source}: a collective with reduction {reduction!r}; known are {known} and avg"
            )
        return _together(s, op, x, over, reduction=reduction, **attrs)
    if not x.type.dtype.is_inexact:
        raise UnsupportedError(f"{s.b.source}: a collective with reduction 'avg' of {x.type}")
    total = _together(s, op, x, over, reduction="sum", **attrs)
    return s.div(total, size_of(group, s.b.source))


def all_reduce(s: Site, x: Value, reduction: str, group: Any) -> Value:
    return _reduce(s, ops.all_reduce, x, reduction, group)


def all_gather_into_tensor(s: Site, x: Value, size: int, group: Any) -> Value:
    whole = x if x.type.rank else s.b.reshape(x, (1,))
    return _together(s, ops.all_gather, whole, _over(s, group)[::-1], dim=0)


def reduce_scatter_tensor(s: Site, x: Value, reduction: str, size: int, group: Any) -> Value:
    return _reduce(s, ops.reduce_scatter, x, reduction, group, dim=0)


def all_to_all_single(
    s: Site, x: Value, received: Sequence[Any], sent: Sequence[Any], group: Any
) -> Value:
    known = all(isinstance(n, int) for n in (*received, *sent))
    if known and len({*received, *sent}) == 1:
        return _exchanged(s, x, _over(s, group))
    sizes = f"{list(sent)} sent, {list(received)} received" if known else "known from data only"
    raise UnsupportedError(
        f"{s.b.source}: all_to_all_single with parts of unequal sizes ({sizes}); shapes are static: pad the parts "
        "to one size (a capacity for each rank)"
    )


def _exchanged(s: Site, x: Value, over: Over) -> Value:
    """Equal parts along dim 0 are exchanged; over several axes as a grid of parts with a dim for each."""
    if len(over) < 2:
        return _together(s, ops.all_to_all, x, over, split_dim=0, concat_dim=0)
    sizes = [along["size"] for along in over]
    length = x.type.shape[0] // math.prod(sizes)
    parts = s.b.reshape(x, (*sizes, length, *x.type.shape[1:]))
    for dim, along in enumerate(over):
        parts = _together(s, ops.all_to_all, parts, [along], split_dim=dim, concat_dim=dim)
    return s.b.reshape(parts, x.type.shape)


def permute(s: Site, x: Value, targets: Sequence[int], group: Any) -> Value:
    over = _over(s, group)
    if len(over) > 1:
        raise UnsupportedError(
            f"{s.b.source}: ranks along several axes of the mesh ({', '.join(a['axis'] for a in over)}) send their "
            "tensors around; send them along one axis at a time, within its group"
        )
    return _together(s, ops.permute, x, over, pairs=tuple(enumerate(targets)))


def wait_tensor(s: Site, x: Value) -> Value:
    return x


def _of_each(rule: Callable[..., Value]) -> Callable[..., list[Value]]:
    """The rule of an op over several tensors: one collective after the other."""
    return lambda s, xs, *args: [rule(s, x, *args) for x in xs]


RULES: Rules = {
    c10d.all_reduce.default: all_reduce,
    c10d.all_reduce_coalesced.default: _of_each(all_reduce),
    c10d.all_gather_into_tensor.default: all_gather_into_tensor,
    c10d.all_gather_into_tensor_coalesced.default: _of_each(all_gather_into_tensor),
    c10d.reduce_scatter_tensor.default: reduce_scatter_tensor,
    c10d.reduce_scatter_tensor_coalesced.default: _of_each(reduce_scatter_tensor),
    c10d.all_to_all_single.default: all_to_all_single,
    c10d.wait_tensor.default: wait_tensor,
    PERMUTE: permute,
    autograd.all_gather_into_tensor.default: all_gather_into_tensor,
    autograd.reduce_scatter_tensor.default: reduce_scatter_tensor,
    autograd.all_to_all_single.default: all_to_all_single,
}
