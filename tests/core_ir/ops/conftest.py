"""What tests of ops share: running an op by its meaning, and seeing a type rule refuse."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plait.core_ir.errors import TypeRuleError
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Array, Op
from plait.core_ir.types import DTYPES, AsyncType, TensorType, type_of


def parse_type(text: str) -> TensorType:
    """`f32[2, 3]` as a type; `async<f32[2, 3]>` too."""
    if started := re.fullmatch(r"async<(.*)>", text):
        return AsyncType(parse_type(started[1]))
    match = re.fullmatch(r"(\w+)\[(.*)\]", text)
    assert match, text
    sizes = tuple(int(size) for size in match[2].split(",") if size.strip())
    return TensorType(DTYPES[match[1]], sizes)


@pytest.fixture(scope="session")
def evaluate() -> Callable[..., list[Array]]:
    """`evaluate(op, *arrays, **attrs)`: the results by the op's meaning, of the types its rule says."""

    def call(op: Op, *operands: object, **attrs: Any) -> list[Array]:
        arrays = [np.asarray(x) for x in operands]
        kept = [x.tobytes() for x in arrays]
        results = list(op.evaluate(arrays, attrs, interpret))
        types = op.types([type_of(x) for x in arrays], attrs)
        assert [type_of(r) for r in results] == list(types)
        assert [x.tobytes() for x in arrays] == kept, "an operand was changed"
        return results

    return call


@pytest.fixture(scope="session")
def accepts() -> Callable[..., list[TensorType]]:
    """`accepts(op, "f32[2]", ..., **attrs)`: the types of the results."""

    def check(op: Op, *types: str, **attrs: Any) -> list[TensorType]:
        return list(op.types([parse_type(t) for t in types], attrs))

    return check


@pytest.fixture(scope="session")
def refuses() -> Callable[..., None]:
    """`refuses(op, number, "f32[2]", ..., **attrs)`: the type rule names that constraint."""

    def check(op: Op, number: int, *types: str, **attrs: Any) -> None:
        with pytest.raises(TypeRuleError, match=rf"^{op.name}: C{number}: "):
            op.types([parse_type(t) for t in types], attrs)

    return check
