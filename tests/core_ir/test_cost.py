"""The time of graphs on hardware whose figures make it easy to compute by hand."""

from dataclasses import replace

import pytest

from plait.core_ir.build import Builder
from plait.core_ir.cost import (
    communication_bytes,
    eqn_seconds,
    flops,
    peak_seconds,
    seconds,
)
from plait.core_ir.graph import Graph, Value
from plait.core_ir.hardware import Hardware, Link
from plait.core_ir.lanes import slowed
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.ops.collective import (
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
    wait,
)
from plait.core_ir.ops.control import cond, scan
from plait.core_ir.ops.elementwise import add, exp
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.ops.shape import transpose
from plait.core_ir.types import DType, TensorType, bf16, f32, f64, i32

FAST_MEMORY = Hardware(
    name="fast memory",
    flops_per_second={"f32": 4.0, "bf16": 16.0},
    bytes_per_second=1e30,
    memory_bytes=1e9,
    inside=Link(8.0, 1e6),  # a latency of a second
    between=Link(2.0, 5e6),
    ranks_per_node=4,
)
SLOW_MEMORY = replace(FAST_MEMORY, bytes_per_second=2.0)


def tensor(*shape: int, dtype: DType = f32) -> TensorType:
    return TensorType(dtype, shape)


def product(b: Builder, x: Value, y: Value) -> Value:
    return b(dot_general, x, y, batch=((), ()), contract=((1,), (0,)))


def one_product(dtype: DType = f32) -> Graph:
    b = Builder("product")
    b.output(product(b, b.input(tensor(2, 3, dtype=dtype)), b.input(tensor(3, 4, dtype=dtype))))
    return b.build()


def test_a_product_takes_its_flops_by_its_dtype() -> None:
    assert flops(one_product()) == 2 * 2 * 3 * 4
    assert seconds(one_product(), FAST_MEMORY) == 48 / 4
    assert seconds(one_product(bf16), FAST_MEMORY) == 48 / 16
    assert seconds(one_product(f64), FAST_MEMORY) == 48 / 2
    half = replace(FAST_MEMORY, product_efficiency=0.5)
    assert seconds(one_product(bf16), half) == 48 / 8
    assert peak_seconds(one_product(bf16), half) == 48 / 16


def test_a_product_whose_operands_come_slowly_takes_that_time() -> None:
    assert seconds(one_product(), SLOW_MEMORY) == 4 * (6 + 12 + 8) / 2
    assert seconds(one_product(bf16), SLOW_MEMORY) == 2 * (6 + 12 + 8) / 2


def test_elementwise_compute_goes_by_f32_and_movement_is_free() -> None:
    b = Builder("elementwise")
    x = b.input(tensor(8, dtype=bf16))
    b.output(b(exp, x))
    assert seconds(b.build(), replace(FAST_MEMORY, product_efficiency=0.1)) == 8 / 4
    assert seconds(b.build(), SLOW_MEMORY) == 2 * (8 + 8) / 2
    b = Builder("movement")
    b.output(b(transpose, b.input(tensor(4, 2)), permutation=(1, 0)))
    assert seconds(b.build(), SLOW_MEMORY) == 0


def test_the_default_stands_for_one_core() -> None:
    assert seconds(one_product()) == pytest.approx(max(48 / 2e10, 4 * 26 / 1e10))
    assert seconds(one_product()) == seconds(one_product(), CPU_CORE)


def square() -> Graph:
    b = Builder("body")
    x = b.input(tensor(3, 3))
    b.output(product(b, x, x))
    return b.build()


def test_graphs_inside_take_what_their_equations_take() -> None:
    b = Builder("looped")
    x = b.input(tensor(3, 3))
    (y,) = b.emit(scan, x, body=square(), num_consts=0, num_carry=1, length=5, reverse=False)
    other = Builder("other")
    other.output(other(add, *[other.input(tensor(3, 3))] * 2))
    branches = (square(), other.build())
    (z,) = b.emit(cond, b.input(tensor(dtype=i32)), y, branches=branches)
    b.output(z)
    graph = b.build()
    assert seconds(graph, FAST_MEMORY) == (5 * 54 + 54) / 4
    assert peak_seconds(graph, FAST_MEMORY) == (5 * 54 + 54) / 4
    assert seconds(graph, SLOW_MEMORY) == (5 + 1) * 4 * 27 / 2


# Collectives: 16 elements of f32 are 64 bytes.


def started(op: object, size: int, axis: str = "expert", **attrs: object) -> Graph:
    b = Builder("collective")
    (handle,) = b.emit(op, b.input(tensor(16)), axis=axis, size=size, **attrs)  # type: ignore[arg-type]
    b.output(b(wait, handle))
    return b.build()


@pytest.mark.parametrize(
    ("op", "attrs", "sent"),
    [
        (all_gather, {"dim": 0}, 64 * 3),
        (reduce_scatter, {"dim": 0, "reduction": "sum"}, 16 * 3),
        (all_reduce, {"reduction": "sum"}, 2 * 16 * 3),
        (all_to_all, {"split_dim": 0, "concat_dim": 0}, 16 * 3),
        (permute, {"pairs": ((0, 1), (1, 0))}, 64),
    ],
)
def test_a_collective_takes_latency_and_what_a_rank_sends(
    op: object, attrs: dict[str, object], sent: int
) -> None:
    graph = started(op, 4, **attrs)
    assert communication_bytes(graph.eqns[0]) == sent
    assert communication_bytes(graph.eqns[1]) == 0
    assert seconds(graph, FAST_MEMORY) == 1 + sent / 8
    assert seconds(graph, FAST_MEMORY, between={"expert"}) == 5 + sent / 2
    assert seconds(graph, FAST_MEMORY, between={"data"}) == 1 + sent / 8


def test_an_axis_longer_than_a_node_lies_between_nodes() -> None:
    graph = started(all_gather, 8, dim=0)
    assert seconds(graph, FAST_MEMORY) == 5 + 64 * 7 / 2
    assert communication_bytes(started(all_gather, 1, dim=0).eqns[0]) == 0


def test_compute_runs_beside_a_collective() -> None:
    b = Builder("two lanes")
    x, y = b.input(tensor(16)), b.input(tensor(32))
    (handle,) = b.emit(permute, x, axis="expert", size=2, pairs=((0, 1),))  # 1 + 64 / 8 = 9
    beside = b(exp, y)  # 32 / 4 = 8
    b.output(b(wait, handle))
    b.output(b(exp, beside))  # 8 again
    graph = b.build()
    assert seconds(graph, FAST_MEMORY) == 9 + 8
    half = replace(FAST_MEMORY, sms=2, comm_sms=1)
    # In 9 seconds of sending 4.5 of the work is done, and the other 3.5 takes as long: 12.5.
    assert seconds(graph, half) == 9 + 3.5 + 8
    assert eqn_seconds(graph.eqns[0], half) == 9


def test_slow_work_is_slow_while_it_is_slow() -> None:
    assert slowed(4, 100, 2) == 8
    assert slowed(4, 8, 2) == 8
    assert slowed(4, 6, 2) == 7
    assert slowed(4, 0, 2) == slowed(4, -3, 2) == slowed(4, 5, 1) == 4
