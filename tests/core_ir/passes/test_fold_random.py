"""fold_transposes on random chains of views and products of many ranks, against the interpreter."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph, Value
from plait.core_ir.interpret import interpret
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.ops.shape import broadcast, reshape, slice_, transpose
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.types import TensorType, i64
from plait.core_ir.verify import verify

Numbers = list[int]
KINDS = (
    "transpose",
    "transpose",
    "reshape",
    "reshape",
    "join",
    "dot",
    "dot",
    "broadcast",
    "units",
    "slice",
    "sum",
)
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 1000), min_size=12, max_size=12)),
    min_size=1,
    max_size=8,
)
MAX_SIZE = 600


def build(steps: Sequence[tuple[str, Numbers]]) -> Graph:
    """Interpret steps; each reads values by number, and makes its attributes from its numbers."""
    b = Builder("views")
    pool = [
        b.input(TensorType(i64, shape)) for shape in ((2, 3, 4), (4, 6), (1, 2, 1, 6), (3, 4, 2))
    ]
    for kind, numbers in steps:
        x = pool[-1 - numbers[0] % len(pool)]
        made = _step(b, kind, x, pool[-1 - numbers[1] % len(pool)], numbers[2:])
        if made is not None and made.type.size <= MAX_SIZE:
            pool.append(made)
    for value in pool[4:]:
        b.output(value)
    b.output(pool[-1])
    return b.build()


def _step(b: Builder, kind: str, x: Value, y: Value, numbers: Numbers) -> Value | None:
    shape, rank = x.type.shape, x.type.rank
    match kind:
        case "transpose":
            order = sorted(range(rank), key=lambda d: (numbers[d % 8], d))
            return b(transpose, x, permutation=tuple(order))
        case "reshape":
            size = x.type.size
            return b(reshape, x, shape=_factors(size, numbers) if size else (numbers[0] % 3, 0))
        case "join" if rank >= 2:
            d = numbers[0] % (rank - 1)
            return b(reshape, x, shape=(*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]))
        case "units":
            d = numbers[0] % (rank + 1)
            return b(reshape, x, shape=(*shape[:d], 1, *shape[d:]))
        case "broadcast":
            d = numbers[0] % (rank + 1)
            grown = tuple(2 if n == 1 and numbers[1] % 2 else n for n in shape)
            dims = tuple(i + (i >= d) for i in range(rank))
            return b(broadcast, x, shape=(*grown[:d], 1 + numbers[2] % 3, *grown[d:]), dims=dims)
        case "slice" if rank:
            d = numbers[0] % rank
            limit = tuple(max(n - (i == d), 0) for i, n in enumerate(shape))
            return b(slice_, x, start=(0,) * rank, limit=limit, strides=(1,) * rank)
        case "sum" if rank:
            return b(reduce_sum, x, dims=(numbers[0] % rank,) if numbers[1] % 4 else ())
        case "dot":
            return _dot(b, x, y, numbers)
    return None


def _factors(size: int, numbers: Numbers) -> tuple[int, ...]:
    found = []
    for number in numbers[:4]:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        found.append(divisors[number % len(divisors)])
        size //= found[-1]
    return (*found, size)


def _dot(b: Builder, x: Value, y: Value, numbers: Numbers) -> Value | None:
    """A product whose dims pair where sizes agree: some as batch, some contracted."""
    pairs: list[tuple[int, int, int]] = []
    taken: set[int] = set()
    for i, size in enumerate(x.type.shape):
        for j, other in enumerate(y.type.shape):
            if size == other and j not in taken and numbers[i % 8] % 4:
                pairs.append((i, j, numbers[i % 8] % 4))
                taken.add(j)
                break
    batch = [(i, j) for i, j, how in pairs if how == 1]
    contract = [(i, j) for i, j, how in pairs if how > 1]
    if numbers[8] % 2:
        contract.reverse()
    free = math.prod(x.type.shape) * math.prod(y.type.shape)
    if free > 200 * MAX_SIZE:
        return None
    dims = [(tuple(i for i, _ in p), tuple(j for _, j in p)) for p in (batch, contract)]
    return b(dot_general, x, y, batch=dims[0], contract=dims[1])


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_folding_keeps_what_a_graph_means(steps: list[tuple[str, Numbers]]) -> None:
    graph = verify(build(steps))
    rng = np.random.default_rng(0)
    operands = [rng.integers(-9, 9, v.type.shape) for v in graph.inputs]
    folded = verify(eliminate_dead_code(fold_transposes(graph)))
    for expected, found in zip(
        interpret(graph, operands), interpret(folded, operands), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    again = eliminate_dead_code(fold_transposes(folded))
    assert len(again.eqns) <= len(folded.eqns)
