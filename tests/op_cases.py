"""Cases of every op with a NumPy meaning, for the tests of both backends.

from op_cases import CASES, OpCase

@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emitter(case: OpCase) -> None:
    case.check(run(case.graph, case.inputs))
"""

from op_families import (
    attention,
    collective,
    control,
    elementwise,
    index,
    linalg,
    random_bits,
    reduce,
    shape,
)
from op_families.case import OpCase

CASES: list[OpCase] = [
    case
    for family in (
        *(elementwise, shape, reduce, index, linalg, attention, random_bits, control),
        collective,
    )
    for case in family.CASES
]

NO_MEANING = frozenset({"extern"})
"""Ops that no case can be made of: they have no NumPy meaning."""

__all__ = ["CASES", "NO_MEANING", "OpCase"]
