"""Along which axes values vary, on graphs by hand."""

import pytest

from plait.core_ir.build import Builder
from plait.core_ir.graph import Value
from plait.core_ir.ops import collective, control, elementwise
from plait.core_ir.passes.varying import NOWHERE, varying
from plait.core_ir.types import TensorType, f32

X = TensorType(f32, (4,))
DATA, BOTH = frozenset({"data"}), frozenset({"data", "model"})


def meet(b: Builder, op: object, x: Value, axis: str, **attrs: object) -> Value:
    return b(collective.wait, b(op, x, axis=axis, size=2, **attrs))


def test_what_collectives_make_of_it() -> None:
    b = Builder("g")
    x, y = b.input(X), b.input(X)
    both = b(elementwise.add, x, y)
    summed = meet(b, collective.all_reduce, both, "data", reduction="sum")
    gathered = meet(b, collective.all_gather, both, "model", dim=0)
    scattered = meet(b, collective.reduce_scatter, y, "data", dim=0, reduction="sum")
    exchanged = meet(b, collective.all_to_all, y, "model", split_dim=0, concat_dim=0)
    shifted = meet(b, collective.permute, y, "data", pairs=((0, 1), (1, 0)))
    place = b(collective.axis_index, axis="data", size=2)
    for value in (summed, gathered, scattered, exchanged, shifted, place):
        b.output(value)
    found = varying(b.build(), [DATA, frozenset({"model"})])
    assert found[both] == BOTH
    assert found[summed] == {"model"}
    assert found[gathered] == DATA
    assert found[scattered] == BOTH
    assert found[exchanged] == {"model"}
    assert found[shifted] == BOTH
    assert found[place] == DATA


@pytest.mark.parametrize("length", [0, 3])
def test_a_scan_gives_what_its_carry_comes_to_vary_along(length: int) -> None:
    """A carry takes from an x of its turn; another becomes the sum of the first; what it was is stacked."""
    body = Builder("body")
    x, before, each = body.input(X), body.input(X), body.input(X)
    body.output(body(elementwise.add, x, each))
    body.output(meet(body, collective.all_reduce, x, "data", reduction="sum"))
    body.output(before)
    b = Builder("g")
    carry, start, xs = b.input(X), b.input(X), b.input(X.with_shape((length, 4)))
    attrs = {"num_consts": 0, "num_carry": 2, "length": length, "reverse": False}
    results = b.emit(control.scan, carry, start, xs, body=body.build(), **attrs)
    for value in results:
        b.output(value)
    model = frozenset({"model"})
    found = [varying(b.build(), [NOWHERE, model, DATA])[value] for value in results]
    assert found == ([DATA, NOWHERE, model] if length else [NOWHERE, model, model])
