"""Control flow on small graphs against jax.lax and loops; markers, barrier and extern."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from plait.core_ir.build import Builder
from plait.core_ir.errors import TypeRuleError, UnsupportedError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.ops.control import barrier, boundary, cond, extern, scan, while_
from plait.core_ir.ops.elementwise import add, compare, mul, neg
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.types import DTYPES, TensorType

f32 = DTYPES["f32"]
MATVEC: dict[str, Any] = dict(batch=((), ()), contract=((1,), (0,)))


def build(
    types: list[TensorType], body: Callable[[Builder, list[Value]], list[Value]], name: str = "body"
) -> Graph:
    b = Builder(name)
    for value in body(b, [b.input(t) for t in types]):
        b.output(value)
    return b.build()


def vector(*shape: int, dtype: str = "f32") -> TensorType:
    return TensorType(DTYPES[dtype], shape)


# scan: h' = w h + x, y = h' * x


def recurrence(b: Builder, values: list[Value]) -> list[Value]:
    w, h, x = values
    new = b(add, b(dot_general, w, h, **MATVEC), x)
    return [new, b(mul, new, x)]


BODY = build([vector(3, 3), vector(3), vector(3)], recurrence)
SCAN: dict[str, Any] = dict(body=BODY, num_consts=1, num_carry=1, length=4, reverse=False)
SCAN_TYPES = ("f32[3, 3]", "f32[3]", "f32[4, 3]")


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_equals_lax_scan(evaluate: Any, reverse: bool) -> None:
    rng = np.random.default_rng(0)
    w, h, xs = (rng.integers(-3, 4, s).astype(np.float32) for s in ((3, 3), 3, (4, 3)))

    def step(h: Any, x: Any) -> Any:
        new = w @ h + x
        return new, new * x

    got = evaluate(scan, w, h, xs, **{**SCAN, "reverse": reverse})
    expected = jax.lax.scan(step, h, xs, reverse=reverse)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_scan_without_xs_or_ys_repeats_its_body(evaluate: Any) -> None:
    double = build([vector()], lambda b, v: [b(add, v[0], v[0])])
    attrs = dict(body=double, num_consts=0, num_carry=1, length=5, reverse=False)
    (got,) = evaluate(scan, np.float32(3), **attrs)
    assert got == 3 * 2**5


def test_scan_of_scans(evaluate: Any) -> None:
    total = build([vector(), vector()], lambda b, v: [b(add, *v)])
    inner: dict[str, Any] = dict(body=total, num_consts=0, num_carry=1, length=3, reverse=False)
    rows = build([vector(), vector(3)], lambda b, v: [b(scan, *v, **inner)])
    xs = np.arange(6, dtype=np.float32).reshape(2, 3)
    (got,) = evaluate(scan, np.float32(1), xs, **{**inner, "body": rows, "length": 2})
    assert got == 1 + xs.sum()
    assert scan.flops([], {**inner, "body": rows, "length": 2}, []) == 6


def test_scan_c1_counts_are_not_negative(refuses: Any) -> None:
    for name in ("num_consts", "num_carry", "length"):
        refuses(scan, 1, *SCAN_TYPES, **{**SCAN, name: -1})


def test_scan_c2_there_are_enough_operands(refuses: Any) -> None:
    refuses(scan, 2, SCAN_TYPES[0], **SCAN)


def test_scan_c3_xs_have_the_length(refuses: Any) -> None:
    refuses(scan, 3, *SCAN_TYPES[:2], "f32[5, 3]", **SCAN)
    refuses(scan, 3, *SCAN_TYPES[:2], "f32[]", **SCAN)


def test_scan_c4_body_takes_consts_carry_and_slices(refuses: Any) -> None:
    refuses(scan, 4, *SCAN_TYPES[:2], "f32[4, 2]", **SCAN)
    refuses(scan, 4, *SCAN_TYPES[:2], **SCAN)
    refuses(scan, 4, "f64[3, 3]", *SCAN_TYPES[1:], **SCAN)


def test_scan_c5_body_gives_the_carry_back(refuses: Any) -> None:
    types = [vector(3, 3), vector(3), vector(3)]
    wrong = build(types, lambda b, v: [v[0], v[1]])
    refuses(scan, 5, *SCAN_TYPES, **{**SCAN, "body": wrong})
    nothing = build(types, lambda b, v: [])
    refuses(scan, 5, *SCAN_TYPES, **{**SCAN, "body": nothing})


def test_scan_c6_length_0_gives_the_carry_and_empty_ys(evaluate: Any) -> None:
    h = np.float32([1, 2, 3])
    attrs = {**SCAN, "length": 0}
    carry, ys = evaluate(
        scan, np.eye(3, dtype=np.float32), h, np.zeros((0, 3), np.float32), **attrs
    )
    np.testing.assert_array_equal(carry, h)
    assert ys.shape == (0, 3)


# cond

NEGATE = build([vector(2), vector(2)], lambda b, v: [b(neg, v[0]), v[1]])
SWAP = build([vector(2), vector(2)], lambda b, v: [v[1], v[0]])
SUM = build([vector(2), vector(2)], lambda b, v: [b(add, *v), b(mul, *v)])
BRANCHES = (NEGATE, SWAP, SUM)
COND_TYPES = ("i32[]", "f32[2]", "f32[2]")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_cond_runs_the_branch_of_its_index(evaluate: Any, index: int) -> None:
    x, y = np.float32([1, 2]), np.float32([3, 5])
    expected = jax.lax.switch(
        index, [lambda x, y: (-x, y), lambda x, y: (y, x), lambda x, y: (x + y, x * y)], x, y
    )
    got = evaluate(cond, np.int32(index), x, y, branches=BRANCHES)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_cond_c1_index_is_an_i32_scalar(refuses: Any) -> None:
    for index in ("bool[]", "i64[]", "i32[1]"):
        refuses(cond, 1, index, *COND_TYPES[1:], branches=BRANCHES)
    refuses(cond, 1, branches=BRANCHES)


def test_cond_c2_branches_take_the_operands(refuses: Any) -> None:
    refuses(cond, 2, *COND_TYPES[:2], branches=BRANCHES)
    refuses(cond, 2, *COND_TYPES[:2], "f32[3]", branches=BRANCHES)


def test_cond_c3_branches_give_the_same_types(refuses: Any) -> None:
    one = build([vector(2), vector(2)], lambda b, v: [v[0]])
    refuses(cond, 3, *COND_TYPES, branches=(SWAP, one))


@pytest.mark.parametrize(("index", "branch"), [(-1, 0), (-(2**31), 0), (3, 2), (2**31 - 1, 2)])
def test_cond_c4_an_index_out_of_range_takes_the_nearest(
    evaluate: Any, index: int, branch: int
) -> None:
    x, y = np.float32([1, 2]), np.float32([3, 5])
    got, expected = (evaluate(cond, np.int32(i), x, y, branches=BRANCHES) for i in (index, branch))
    np.testing.assert_array_equal(got, expected)


def test_cond_flops_are_those_of_the_costliest_branch() -> None:
    assert cond.flops([], {"branches": BRANCHES}, []) == 4


# while: n' = n + step while n < limit, with x' = x * factor beside it


def below(b: Builder, v: list[Value]) -> list[Value]:
    limit, n, _ = v
    return [b(compare, n, limit, direction="lt")]


def advance(b: Builder, v: list[Value]) -> list[Value]:
    step, factor, n, x = v
    return [b(add, n, step), b(mul, x, factor)]


I32 = vector(dtype="i32")
WHILE: dict[str, Any] = dict(
    cond=build([I32, I32, vector(2)], below, "cond"),
    body=build([I32, vector(2), I32, vector(2)], advance),
    cond_nconsts=1,
    body_nconsts=2,
)
WHILE_TYPES = ("i32[]", "i32[]", "f32[2]", "i32[]", "f32[2]")


@pytest.mark.parametrize(("limit", "rounds"), [(0, 0), (1, 1), (7, 4)])
def test_while_runs_as_long_as_its_condition_holds(evaluate: Any, limit: int, rounds: int) -> None:
    factor, x = np.float32([2, 3]), np.float32([1, -1])
    operands = (np.int32(limit), np.int32(2), factor, np.int32(0), x)
    n, got = evaluate(while_, *operands, **WHILE)
    assert n == 2 * rounds
    np.testing.assert_array_equal(got, x * factor**rounds)


def test_while_c1_counts(refuses: Any) -> None:
    refuses(while_, 1, *WHILE_TYPES, **{**WHILE, "cond_nconsts": -1})
    refuses(while_, 1, *WHILE_TYPES[:2], **WHILE)


def test_while_c2_cond_takes_its_consts_and_carry(refuses: Any) -> None:
    refuses(while_, 2, "i64[]", *WHILE_TYPES[1:], **WHILE)


def test_while_c3_cond_gives_one_bool(refuses: Any) -> None:
    number = build([I32, I32, vector(2)], lambda b, v: [v[0]])
    refuses(while_, 3, *WHILE_TYPES, **{**WHILE, "cond": number})


def test_while_c4_body_takes_its_consts_and_carry(refuses: Any) -> None:
    refuses(while_, 4, "i32[]", "i64[]", *WHILE_TYPES[2:], **WHILE)


def test_while_c5_body_gives_the_carry_back(refuses: Any) -> None:
    wrong = build([I32, vector(2), I32, vector(2)], lambda b, v: [v[2]])
    refuses(while_, 5, *WHILE_TYPES, **{**WHILE, "body": wrong})


def test_while_flops_are_those_of_one_round() -> None:
    assert while_.flops([], WHILE, []) == 1 + 1 + 2


# boundary, barrier, extern


@pytest.mark.parametrize(
    ("op", "attrs"), [(boundary, dict(index=0, backward=True)), (barrier, {})], ids=str
)
def test_boundary_and_barrier_are_the_identity(evaluate: Any, op: Any, attrs: Any) -> None:
    arrays = [np.float32([1, 2]), np.int32(3), np.zeros((0, 2), bool)]
    for got, x in zip(evaluate(op, *arrays, **attrs), arrays, strict=True):
        np.testing.assert_array_equal(got, x)
    assert evaluate(op, **attrs) == []
    assert op.flops([], attrs, []) == 0


def test_boundary_c1_index_is_not_negative(refuses: Any) -> None:
    refuses(boundary, 1, "f32[2]", index=-1, backward=False)


EXTERN: dict[str, Any] = dict(
    target="torch:aten.foo.default", results=(vector(2), I32), spec='{"args": [0, 1.5]}'
)


def test_extern_has_the_results_it_says(accepts: Any) -> None:
    assert tuple(accepts(extern, "f32[4]", **EXTERN)) == EXTERN["results"]
    assert accepts(extern, **{**EXTERN, "results": ()}, effect=True) == []


def test_extern_has_no_meaning_in_numpy(evaluate: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"aten\.foo\.default.*torch backend only"):
        evaluate(extern, np.float32(1), **EXTERN)


def test_extern_c1_target_names_framework_and_op(refuses: Any) -> None:
    for target in ("aten.foo.default", "torch:", "tf:foo"):
        refuses(extern, 1, **{**EXTERN, "target": target})
    extern.types([], {**EXTERN, "target": "jax:foo"})


def test_extern_c2_spec_is_json(refuses: Any) -> None:
    refuses(extern, 2, **{**EXTERN, "spec": "{'args': 1}"})


def test_attributes_must_be_graphs() -> None:
    with pytest.raises(TypeRuleError, match="attribute body must be a graph"):
        scan.types([], {**SCAN, "body": 3})
    with pytest.raises(TypeRuleError, match="attribute branches must be a tuple of graphs"):
        cond.types([vector(dtype="i32")], {"branches": ()})
