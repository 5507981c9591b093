"""Collectives over groups of more than one rank: graphs and the operands of each rank, for tests of both backends.

The meaning of each is `interpret_ranks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from op_families.case import ALL, Tolerance, assert_close, edges, named, random

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.op import Array
from plait.core_ir.ops import collective as ops
from plait.core_ir.ops.control import scan
from plait.core_ir.ops.elementwise import add, neg
from plait.core_ir.parse import parse_graph
from plait.core_ir.passes.multiplex import multiplex
from plait.core_ir.passes.overlap import overlap
from plait.core_ir.types import DType, type_of


@dataclass(frozen=True, eq=False)
class RanksCase:
    """A graph, and its operands on each rank of a mesh."""

    name: str
    graph: Graph
    operands: tuple[tuple[Array, ...], ...]
    mesh: dict[str, int]
    tolerance: Tolerance = "exact"

    def expected(self) -> list[list[Array]]:
        """The outputs of each rank by the NumPy meaning."""
        return interpret_ranks(self.graph, self.operands, self.mesh)

    def check(self, results: Sequence[Sequence[Array]]) -> None:
        """AssertionError unless each rank's outputs are as expected."""
        for rank, (got, want) in enumerate(zip(results, self.expected(), strict=True)):
            self.check_rank(rank, got, want)

    def check_rank(self, rank: int, got: Sequence[Array], want: Sequence[Array]) -> None:
        """The same of one rank."""
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            where = f"{self.name}, rank {rank}, result {index}: {type_of(b)}"
            assert type_of(a) == type_of(b), f"{where}: {type_of(a)}"
            assert_close(a, b, self.tolerance, where)


def cases(size: int, dtypes: Sequence[str] = ALL) -> list[RanksCase]:
    """Cases over one axis `data` of that many ranks, at least 2; and of two axes where it is even."""
    found = [
        *_reductions(size, dtypes),
        *_movements(size, dtypes),
        _two_starts(size),
        _turned(size),
        _loop(size),
    ]
    return [*found, _two_axes(size)] if size % 2 == 0 and size > 2 else found


def _case(
    name: str,
    size: int,
    calls: Sequence[tuple[Any, dict[str, Any], Sequence[Array]]],
    tolerance: Tolerance = "exact",
) -> RanksCase:
    """Each call is an op, its attributes, and the operand of each rank."""
    b = Builder(name.replace("-", "_"))
    for op, attrs, arrays in calls:
        started = b(op, b.input(type_of(arrays[0])), axis="data", size=size, **attrs)
        b.output(b(ops.wait, started))
    operands = tuple(tuple(arrays[r] for _, _, arrays in calls) for r in range(size))
    return RanksCase(name, b.build(), operands, {"data": size}, tolerance)


def _ranks(dtype: str, size: int, *shape: int) -> list[Array]:
    return [random(dtype, *shape, seed=rank) for rank in range(size)]


def _edges(dtype: str, size: int) -> list[Array]:
    """The values at which implementations differ, each rank's turned by one."""
    values = edges(dtype)
    return [np.roll(values, rank) for rank in range(size)]


def _reduces(dtype: DType, reduction: str) -> bool:
    return dtype.kind != ("bool" if reduction in ("sum", "product") else "complex")


def _reductions(size: int, dtypes: Sequence[str]) -> list[RanksCase]:
    found = []
    for reduction in ("sum", "product", "max", "min"):
        exact: list[Any] = []
        rounded: list[Any] = []
        attrs = {"reduction": reduction}
        for dtype in dtypes:
            if not _reduces(named(dtype), reduction):
                continue
            adds = reduction in ("sum", "product")
            calls = rounded if adds and named(dtype).is_inexact else exact
            arrays = _ranks(dtype, size, 3, 2 * size)
            calls.append((ops.reduce_scatter, {**attrs, "dim": 1}, arrays))
            # A sum of infinities, or of the largest numbers, is another in another order.
            wild = not (adds and named(dtype).is_inexact)
            arrays = _edges(dtype, size) if wild else _ranks(dtype, size, 5)
            calls.append((ops.all_reduce, attrs, arrays))
        calls = rounded if reduction in ("sum", "product") else exact
        calls.append((ops.all_reduce, attrs, _ranks("f32", size)))
        calls.append((ops.reduce_scatter, {**attrs, "dim": 0}, _ranks("f32", size, 2 * size, 3)))
        found.append(_case(f"{reduction}-rounded", size, rounded, "rounded"))
        found.append(_case(f"{reduction}-exact", size, exact))
    return [case for case in found if case.operands[0]]


def _movements(size: int, dtypes: Sequence[str]) -> list[RanksCase]:
    gather = [(ops.all_gather, {"dim": d}, _ranks("f32", size, 2, 3, 2)) for d in (0, 1, 2)]
    gather += [(ops.all_gather, {"dim": 1}, _ranks(dtype, size, 2, 3)) for dtype in dtypes]
    gather += [(ops.all_gather, {"dim": 0}, _edges(dtype, size)) for dtype in ("f32", "u64")]
    exchange = [
        (ops.all_to_all, {"split_dim": s, "concat_dim": c}, _ranks("f32", size, size, 2 * size, 2))
        for s, c in ((0, 0), (1, 0), (0, 2), (1, 1))
    ]
    exchange += [
        (ops.all_to_all, {"split_dim": 1, "concat_dim": 0}, _ranks(dtype, size, 2, size))
        for dtype in dtypes
    ]
    ring = tuple((rank, (rank + 1) % size) for rank in range(size))
    some = (ring, ring[:-1], ((size - 1, 0),), (), ((0, 0), (1, size - 1)))
    shapes = ((3, 2), (2,), (), (3,), (1, 2))
    permute = [
        (ops.permute, {"pairs": pairs}, _ranks("f32", size, *shape))
        for pairs, shape in zip(some, shapes, strict=True)
    ]
    permute += [(ops.permute, {"pairs": ring[:-1]}, _ranks(dtype, size, 2)) for dtype in dtypes]
    permute += [(ops.permute, {"pairs": ring}, _ranks(dtype, size)) for dtype in ("c64", "u16")]
    return [
        _case("all_gather", size, gather),
        _case("all_to_all", size, exchange),
        _case("permute", size, permute),
    ]


def _two_starts(size: int) -> RanksCase:
    """Two collectives under way at once, compute between start and wait, and the place of the rank."""
    b = Builder("overlapped")
    over = {"axis": "data", "size": size}
    arrays = _ranks("f32", size, 4, 3)
    x = b.input(type_of(arrays[0]))
    first = b(ops.all_reduce, x, reduction="max", **over)
    second = b(ops.all_gather, b(neg, x), dim=1, **over)
    y = b(add, x, x)
    b.output(b(add, y, b(ops.wait, first)))
    b.output(b(ops.wait, second))
    place = b(ops.axis_index, **over)
    b.output(b(add, place, place))
    unread = b(ops.all_reduce, y, reduction="sum", **over)
    b(ops.wait, unread)
    return RanksCase("overlapped", b.build(), tuple((a,) for a in arrays), {"data": size})


def _turned(size: int) -> RanksCase:
    """Operands that are views: a transpose, a broadcast; and a collective of a result of another."""
    b = Builder("turned")
    over = {"axis": "data", "size": size}
    arrays = _ranks("f32", size, 2, 3)
    x = b.input(type_of(arrays[0]))
    turned = b(ops.wait, b(ops.all_gather, b.transpose(x, (1, 0)), dim=0, **over))
    b.output(turned)
    wide = b.expand(b.reshape(x, (2, 3, 1)), (2, 3, size))
    exchanged = b(ops.wait, b(ops.all_to_all, wide, split_dim=2, concat_dim=0, **over))
    b.output(b(ops.wait, b(ops.all_reduce, exchanged, reduction="max", **over)))
    b.output(b(ops.wait, b(ops.permute, b.transpose(x, (1, 0)), pairs=((0, 1),), **over)))
    return RanksCase("turned", b.build(), tuple((a,) for a in arrays), {"data": size})


def _loop(size: int) -> RanksCase:
    """Collectives in a loop too long to be unrolled: the largest so far goes round."""
    over = {"axis": "data", "size": size}
    arrays = _ranks("f32", size, 2)
    body = Builder("body")
    carry, x = body.input(type_of(arrays[0])), body.input(type_of(arrays[0]))
    largest = body(ops.wait, body(ops.all_reduce, body(add, carry, x), reduction="max", **over))
    body.output(body(ops.wait, body(ops.permute, largest, pairs=((0, 1), (1, 0)), **over)))
    body.output(largest)
    b = Builder("loop")
    steps = [np.tile(np.arange(60, dtype=np.float32)[:, None], (1, 2)) * r for r in range(size)]
    start = b.input(type_of(arrays[0]))
    loop = dict(num_consts=0, num_carry=1, length=60, reverse=False)
    for result in b.emit(scan, start, b.input(type_of(steps[0])), body=body.build(), **loop):
        b.output(result)
    operands = tuple(zip(arrays, steps, strict=True))
    return RanksCase("loop", b.build(), operands, {"data": size}, "rounded")


def _two_axes(size: int) -> RanksCase:
    """A sum over one axis of a gather over another."""
    b = Builder("axes")
    arrays = [np.arange(4, dtype=np.float32) + 10 * rank for rank in range(size)]
    x = b.input(type_of(arrays[0]))
    whole = b(ops.wait, b(ops.all_gather, x, dim=0, axis="model", size=2))
    total = b(ops.all_reduce, whole, reduction="sum", axis="data", size=size // 2)
    b.output(b(ops.wait, total))
    b.output(b(ops.axis_index, axis="model", size=2))
    mesh = {"data": size // 2, "model": 2}
    return RanksCase("axes", b.build(), tuple((a,) for a in arrays), mesh)


HALF = """plait.ir 1

graph @{name}(%x: f32[64, 64] {{activation "x"}}, %w: f32[64, 64] {{param "w"}})
    -> (%y: f32[64, 64] {{{role} "y"}}) {{
  %a: f32[64, 64] = dot_general(%x, %w) {{batch=[[], []], contract=[[1], [0]]}}
  %h: async<f32[64, 64]> = all_to_all(%a) {{axis="expert", concat_dim=0, size=2, split_dim=0}}
  %b: f32[64, 64] = wait(%h)
  %c: f32[64, 64] = tanh(%b)
  %d: f32[64, 64] = dot_general(%c, %w) {{batch=[[], []], contract=[[1], [0]]}}
  %k: async<f32[64, 64]> = all_to_all(%d) {{axis="expert", concat_dim=0, size=2, split_dim=0}}
  %y: f32[64, 64] = wait(%k)
}}
"""
"""What an expert layer does: a product, dispatch, the experts, combine."""


def slow_exchange(eqn: Eqn) -> float:
    return {"dot_general": 4.0, "all_to_all": 4.0}.get(eqn.op.name, 0.1)


def overlapped_pair() -> Graph:
    """Two such halves in one graph over the axis "expert" of 2, ordered so that each hides the other's exchanges."""
    forward = parse_graph(HALF.format(name="m.stage1.forward", role="activation"))
    backward = parse_graph(HALF.format(name="m.stage0.backward", role="gradient"))
    return overlap(multiplex(forward, backward), slow_exchange)


UNDER_WAY = """plait.ir 1

graph @t(%x: f32[4, 6] {activation "x"}, %w: f32[6, 6] {param "w"}, %n: i32[2] {residual "n"})
    -> (%y: f32[4, 6] {gradient "y"}, %z: f32[2, 12], %v: f32[4, 12], %u: f32[4, 3], %t: f32[4, 6], %q: i32[2]) {
  %hq: async<i32[2]> = all_reduce(%n) {axis="e", reduction="max", size=2}
  %h: async<f32[2, 12]> = all_to_all(%x) {axis="e", concat_dim=1, size=2, split_dim=0}
  %g: async<f32[4, 12]> = all_gather(%x) {axis="e", dim=1, size=2}
  %r: async<f32[4, 3]> = reduce_scatter(%x) {axis="e", dim=1, reduction="sum", size=2}
  %s: async<f32[4, 6]> = all_reduce(%x) {axis="e", reduction="sum", size=2}
  %y: f32[4, 6] = dot_general(%x, %w) {batch=[[], []], contract=[[1], [0]]}
  %k: f32[4, 6] = tanh(%y)
  %z: f32[2, 12] = wait(%h)
  %v: f32[4, 12] = wait(%g)
  %u: f32[4, 3] = wait(%r)
  %t0: f32[4, 6] = wait(%s)
  %q: i32[2] = wait(%hq)
  %t: f32[4, 6] = add(%t0, %k)
}
"""
"""The gradient is ready while five collectives are under way; that of integers cannot be handed on."""
