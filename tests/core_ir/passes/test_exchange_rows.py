"""exchange_rows: the same results with collectives along dim 0 alone; and tasks that are cut while one is under way."""

import pytest
from collective_cases import UNDER_WAY, RanksCase, cases

from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.ops.collective import STARTS
from plait.core_ir.parse import parse_graph
from plait.core_ir.passes.cut_at_messages import cut_at_messages
from plait.core_ir.passes.exchange_rows import exchange_rows, exchanges_rows, is_of_rows
from plait.core_ir.types import AsyncType
from plait.core_ir.verify import verify


@pytest.mark.parametrize(
    "case", [*cases(2, ("f32", "bf16")), *cases(4, ("f32",))], ids=lambda c: c.name
)
def test_the_same_results(case: RanksCase) -> None:
    starts = [eqn for eqn in case.graph.eqns if eqn.op in STARTS and exchanges_rows(eqn)]
    after = exchange_rows(case.graph, {eqn.result for eqn in starts})
    verify(after)
    assert all(is_of_rows(e) for e in after.eqns if e.op in STARTS and exchanges_rows(e))
    found = interpret_ranks(after, case.operands, case.mesh)
    for got, want in zip(found, case.expected(), strict=True):
        for a, b in zip(got, want, strict=True):
            assert a.tobytes() == b.tobytes()


def test_what_is_under_way_where_a_task_is_cut() -> None:
    first, second = cut_at_messages(parse_graph(UNDER_WAY), [[0]], lambda _: 1.0)
    handed_on = [t for t in first.graph.output_types if isinstance(t, AsyncType)]
    assert len(handed_on) == 4
    assert [t for t in second.graph.input_types if isinstance(t, AsyncType)] == handed_on
    names = [eqn.op.name for eqn in first.graph.eqns]
    assert names[-2:] == ["wait", "dot_general"]  # of the integers
