"""The cases themselves: every op with a meaning has one, and the check can fail."""

import numpy as np
import pytest
from op_cases import CASES, NO_MEANING

from plait.core_ir.ops import OPS


def test_every_op_with_a_meaning_has_a_case() -> None:
    assert {case.op.name for case in CASES} == set(OPS) - NO_MEANING


def test_names_of_cases_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name", ["add-float", "exp-float", "reduce_sum-float", "xor-integer"])
def test_check_refuses_another_number_another_type_and_a_missing_result(name: str) -> None:
    (case,) = (c for c in CASES if c.name == name)
    right = case.expected()
    case.check(right)
    wrong = right[0].copy()
    wrong.reshape(-1)[0] = wrong.reshape(-1)[0] * 2 + 1
    with pytest.raises(AssertionError, match=name):
        case.check([wrong, *right[1:]])
    with pytest.raises(AssertionError, match=name):
        case.check([right[0].astype(np.float16), *right[1:]])
    with pytest.raises(AssertionError, match=name):
        case.check(right[1:])
