"""Collectives that write into a tensor (`torch.distributed.all_reduce(x)`) as functional ones, during a capture.

Their own ops are opaque to a tracer. What one writes has no gradient, as in an eager run: autograd goes on from the
tensor as it was before.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.nn import functional as differentiable

from plait.core_ir.errors import UnsupportedError
from plait.frontends.torch.permute import Sent
from plait.frontends.torch.replacing import replaced
from plait.frontends.torch.sources import calling_source

Group: TypeAlias = dist.ProcessGroup | None

_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def _all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None) -> None:
    tensor.copy_(functional.all_reduce(tensor, _reduction(op), _group(group)))


def _all_gather_into_tensor(output: Tensor, input: Tensor, group: Group = None) -> None:
    """Joined along dim 0, or along a dim of its own, as the output has room for."""
    output.copy_(functional.all_gather_single(input, 0, _group(group)).view(output.shape))


def _all_gather(tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None) -> None:
    gathered = functional.all_gather_single(tensor.reshape(1, -1), 0, _group(group))
    for output, part in zip(_equal(tensor_list), gathered, strict=True):
        output.copy_(part.view(output.shape))


def _reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Group = None
) -> None:
    parts = input.reshape(-1, *output.shape[1:])
    output.copy_(functional.reduce_scatter_single(parts, _reduction(op), 0, _group(group)))


def _reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
) -> None:
    _reduce_scatter_tensor(output, torch.cat(list(_equal(input_list))), op, group)


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
) -> None:
    sizes = output_split_sizes or None, input_split_sizes or None
    output.copy_(functional.all_to_all_single(input, *sizes, _group(group)))


def _all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: Group = None
) -> None:
    given = torch.stack([x.reshape(-1) for x in _equal(input_tensor_list)])
    parts = functional.all_to_all_single(given, None, None, _group(group))
    for output, part in zip(_equal(output_tensor_list), parts, strict=True):
        output.copy_(part.view(output.shape))


def _reduction(op: Any) -> str:
    name = _REDUCTIONS.get(getattr(op, "op", op))
    if name is None:
        known = ", ".join(x.upper() for x in _REDUCTIONS.values())
        raise UnsupportedError(
            f"{calling_source()}: a collective with reduction {op}; known are {known}"
        )
    return name


def _group(group: Group) -> dist.ProcessGroup:
    chosen = group or dist.group.WORLD
    assert chosen is not None
    return chosen


def _equal(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    shapes = {tuple(x.shape) for x in tensors}
    if len({math.prod(shape) for shape in shapes}) > 1:
        raise UnsupportedError(
            f"{calling_source()}: a collective over tensors of unequal sizes, {sorted(shapes)}; pad them to one size"
        )
    return tensors


_PLAIN: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,
    "_all_gather_base": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}


def _replacing(plain: Callable[..., None]) -> Callable[..., Sent | None]:
    @functools.wraps(plain)
    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Sent | None:
        if args and isinstance(args[-1], bool):  # async_op is the last parameter of all
            *args, async_op = args  # type: ignore[assignment]
        with torch.no_grad():
            plain(*args, **kwargs)
        return Sent() if async_op else None

    return call


@contextmanager
def functional_forms() -> Iterator[None]:
    """Inside, collectives of `torch.distributed` that write into tensors are functional ones and copies.

    So those of `torch.distributed.nn`, which are made of them, can be traced, though they say that they cannot.
    """
    originals = vars(distributed_c10d)
    functions = {n: (originals[n], _replacing(f)) for n, f in _PLAIN.items() if n in originals}
    refusing = differentiable._not_supported_under_compile
    with replaced({**functions, "_not_supported_under_compile": (refusing, _pass)}):
        yield


def _pass(*_: Any, **__: Any) -> None:
    """Do nothing."""
