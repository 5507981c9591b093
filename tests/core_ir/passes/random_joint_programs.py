"""Random joint programs in integers, which wrap: sums are exact in any order, so results compare bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from joint_programs import cut, differentiate, matmul, matrix, together, total

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph, Value
from plait.core_ir.ops.collective import all_reduce
from plait.core_ir.ops.elementwise import add, mul, neg, sub
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.types import i64

SIZE = 3
NUM_PARAMS = 4
KINDS = (
    *("add", "sub", "mul", "neg", "matmul", "transpose", "spread", "constant"),
    *("param", "param", "cut", "cut", "buffer", "aux", "together"),
)

Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=25,
)
FROZEN = st.sets(st.integers(0, NUM_PARAMS - 1), max_size=2)


@dataclass
class RandomJoint:
    """A joint graph and its number of stages."""

    graph: Graph
    num_stages: int


def build(steps: Sequence[Step], frozen: set[int]) -> RandomJoint:
    """Interpret steps: each reads values by number, counted back from the newest."""
    b = Builder("random")
    shape = (SIZE, SIZE)
    params = [matrix(b, "param", f"p{i}", *shape, dtype=i64) for i in range(NUM_PARAMS)]
    pool = [matrix(b, "batch", f"x{i}", *shape, dtype=i64) for i in range(2)]
    buffers = {
        f"m{i % 2}.b{i}": matrix(b, "buffer", f"m{i % 2}.b{i}", *shape, dtype=i64) for i in range(3)
    }
    updates: dict[str, Value] = {}
    num_cuts = num_aux = 0
    for kind, i, j in steps:
        x, y = pool[-1 - i % len(pool)], pool[-1 - j % len(pool)]
        match kind:
            case "add":
                pool.append(b(add, x, y))
            case "sub":
                pool.append(b(sub, x, y))
            case "mul":
                pool.append(b(mul, x, y))
            case "neg":
                pool.append(b(neg, x))
            case "matmul":
                pool.append(matmul(b, x, y))
            case "transpose":
                pool.append(b.transpose(x, (1, 0)))
            case "spread":
                pool.append(b.expand(b(reduce_sum, x, dims=(0,)), shape))
            case "constant":
                pool.append(b(mul, pool[-1], b.full(x.type, j)))
            case "param":
                pool.append(matmul(b, pool[-1], params[j % NUM_PARAMS]))
            case "cut":
                passed = dict.fromkeys((pool[-1], x)) if j % 2 else [pool[-1]]
                for value, result in zip(passed, cut(b, num_cuts, *passed), strict=True):
                    if j % 3:
                        pool[pool.index(value)] = result
                    else:
                        pool.append(result)
                num_cuts += 1
            case "buffer":
                name = f"m{i % 2}.b{i % 3}"
                if name in buffers and name not in updates:
                    if j % 3 == 0:
                        pool.append(b(add, pool[-1], buffers[name]))
                    updates[name] = b(add, buffers[name], pool[-1] if j % 2 else b.full(x.type, 1))
            case "together":
                attrs = {"axis": ("data", "model")[j % 2], "size": 1, "reduction": "sum"}
                reduced = together(b, all_reduce, x, **attrs)
                if j % 3:
                    pool.append(reduced)
            case "aux":
                b.output(x, "aux", str(num_aux))
                num_aux += 1
    for name, value in updates.items():
        b.output(value, "buffer_update", name)
    trainable = {f"p{i}": value for i, value in enumerate(params) if i not in frozen}
    graph = differentiate(b, total(b, pool[-1]), trainable)
    return RandomJoint(graph, num_cuts + 1)
