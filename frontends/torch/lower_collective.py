"""Lowering rules: torch's functional collectives, each a start with its wait behind it.

`wait_tensor` gives its operand: where waits stand is for passes to decide.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Value
from plait.core_ir.op import Op
from plait.core_ir.ops import collective as ops
from plait.frontends.torch.groups import axis_of, size_of
from plait.frontends.torch.rules import Rules, Site

c10d = torch.ops._c10d_functional
autograd = torch.ops._c10d_functional_autograd


def _together(s: Site, op: Op, x: Value, **attrs: Any) -> Value:
    return s(ops.wait, s(op, x, **attrs))


def _over(s: Site, group: Any, size: int) -> dict[str, Any]:
    return {"axis": axis_of(group, s.b.source), "size": size}


def _reduce(s: Site, op: Op, x: Value, reduction: str, **attrs: Any) -> Value:
    if reduction != "avg":
        if reduction not in ops.REDUCTIONS:
            known = ", ".join(ops.REDUCTIONS)
            raise UnsupportedError(
                f"{s.b.source}: a collective with reduction {reduction!r}; known are {known} and avg"
            )
        return _together(s, op, x, reduction=reduction, **attrs)
    if not x.type.dtype.is_inexact:
        raise UnsupportedError(f"{s.b.source}: a collective with reduction 'avg' of {x.type}")
    return s.div(_together(s, op, x, reduction="sum", **attrs), attrs["size"])


def all_reduce(s: Site, x: Value, reduction: str, group: Any) -> Value:
    over = _over(s, group, size_of(group, s.b.source))
    return _reduce(s, ops.all_reduce, x, reduction, **over)


def all_gather_into_tensor(s: Site, x: Value, size: int, group: Any) -> Value:
    whole = x if x.type.rank else s.b.reshape(x, (1,))
    return _together(s, ops.all_gather, whole, dim=0, **_over(s, group, size))


def reduce_scatter_tensor(s: Site, x: Value, reduction: str, size: int, group: Any) -> Value:
    return _reduce(s, ops.reduce_scatter, x, reduction, dim=0, **_over(s, group, size))


def all_to_all_single(
    s: Site, x: Value, received: Sequence[Any], sent: Sequence[Any], group: Any
) -> Value:
    known = all(isinstance(n, int) for n in (*received, *sent))
    if not known or len({*received, *sent}) != 1:
        sizes = f"{list(sent)} sent, {list(received)} received" if known else "known from data only"
        raise UnsupportedError(
            f"{s.b.source}: all_to_all_single with parts of unequal sizes ({sizes}); shapes are static: pad the parts "
            "to one size (a capacity for each rank)"
        )
    over = _over(s, group, len(sent))
    return _together(s, ops.all_to_all, x, split_dim=0, concat_dim=0, **over)


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
    autograd.all_gather_into_tensor.default: all_gather_into_tensor,
    autograd.reduce_scatter_tensor.default: reduce_scatter_tensor,
    autograd.all_to_all_single.default: all_to_all_single,
}
