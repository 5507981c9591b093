"""Ranks that are threads: every collective as the NumPy meaning says, and what happens when one does not come."""

import numpy as np
import pytest
import torch
from collective_cases import UNDER_WAY, RanksCase, cases

from plait.backends.parts import PartedTask
from plait.backends.torch.arrays import to_torch
from plait.backends.torch.compile import compile_task
from plait.backends.torch.threads import Threads
from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import ExecutionError
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh
from plait.core_ir.op import Array
from plait.core_ir.parse import parse_graph
from plait.core_ir.passes.cut_at_messages import cut_at_messages

CPU = torch.device("cpu")


def run(case: RanksCase, codegen: str) -> list[list[Array]]:
    threads = Threads(list(Mesh(case.mesh).places()), case.mesh)
    threads.enter()
    task = compile_task(case.graph, codegen=codegen, device=CPU)

    def rank(number: int) -> list[Array]:
        operands = [to_torch(x, None, CPU).clone() for x in case.operands[number]]
        return [to_numpy(y) for y in task(operands)]

    return threads.run(rank)


@pytest.mark.parametrize("case", [*cases(2), *cases(4, ("f32", "i32"))], ids=lambda c: c.name)
def test_collectives(case: RanksCase) -> None:
    case.check(run(case, "eager"))


def test_compiled_code() -> None:
    case = next(case for case in cases(2) if case.name == "overlapped")
    case.check(run(case, "inductor"))


def test_a_rank_that_fails_is_named_not_those_that_wait() -> None:
    case = next(case for case in cases(2) if case.name == "overlapped")
    threads = Threads(list(Mesh(case.mesh).places()), case.mesh)
    threads.enter()
    task = compile_task(case.graph, codegen="eager", device=CPU)

    def rank(number: int) -> None:
        if number == 1:
            raise ValueError("lost")
        task([to_torch(x, None, CPU).clone() for x in case.operands[number]])

    with pytest.raises(ValueError, match="lost"):
        threads.run(rank)
    with pytest.raises(ExecutionError, match="waits in a collective over 'data'"):
        threads.run(lambda number: rank(number) if number == 0 else None)


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_collectives_that_are_under_way_where_a_task_is_cut(codegen: str) -> None:
    graph = parse_graph(UNDER_WAY)
    parts = cut_at_messages(graph, [[0]], lambda _: 1.0)
    assert len(parts) == 2
    rng = np.random.default_rng(0)
    operands = [
        [
            rng.normal(size=(4, 6)).astype(np.float32),
            rng.normal(size=(6, 6)).astype(np.float32),
            rng.integers(0, 9, 2, dtype=np.int32),
        ]
        for _ in range(2)
    ]
    mesh = {"e": 2}
    threads = Threads(list(Mesh(mesh).places()), mesh)
    threads.enter()
    tasks = tuple(compile_task(part.graph, codegen=codegen, device=CPU) for part in parts)

    def rank(number: int) -> list[Array]:
        found: dict[int, torch.Tensor] = {}
        for ready in PartedTask(parts, tasks).run([torch.tensor(x) for x in operands[number]]):
            found.update(ready)
        return [to_numpy(found[index]) for index in range(len(found))]

    for got, want in zip(threads.run(rank), interpret_ranks(graph, operands, mesh), strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
