"""Each emitter against the NumPy meaning of its op."""

import jax
import numpy as np
import pytest
from op_cases import CASES, NO_MEANING, OpCase

from plait.backends.jax.emit import NOT_EMITTED, TABLE, emit
from plait.core_ir.ops import FAMILIES, OPS


def run(case: OpCase) -> list[np.ndarray]:
    with jax.enable_x64(True):
        compiled = (
            jax.jit(emit(case.graph))
            .lower(*case.inputs)
            .compile(compiler_options={"xla_allow_excess_precision": False})
        )
        return [np.asarray(x) for x in compiled(*case.inputs)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emitter(case: OpCase) -> None:
    case.check(run(case))


def test_every_op_is_emitted_or_listed_with_a_reason() -> None:
    assert set(OPS.values()) - {OPS[name] for name in NOT_EMITTED} == set(TABLE)
    assert all(NOT_EMITTED.values())
    assert {case.op.name for case in CASES} == set(OPS) - NO_MEANING


@pytest.mark.parametrize("family", FAMILIES)
def test_every_emitter_lowers_for_cuda_on_this_machine(family: str) -> None:
    for case in CASES:
        if case.op in FAMILIES[family]:
            with jax.enable_x64(True):
                traced = jax.jit(emit(case.graph)).trace(*case.inputs)
                assert traced.lower(lowering_platforms=("cuda",)).as_text(), case.name
