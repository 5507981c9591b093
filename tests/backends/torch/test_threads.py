"""Ranks that are threads: every collective as the NumPy meaning says, and what happens when one does not come."""

import pytest
import torch
from collective_cases import RanksCase, cases

from plait.backends.torch.arrays import to_torch
from plait.backends.torch.compile import compile_task
from plait.backends.torch.threads import Threads
from plait.core_ir.arrays import to_numpy
from plait.core_ir.errors import ExecutionError
from plait.core_ir.mesh import Mesh
from plait.core_ir.op import Array

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
