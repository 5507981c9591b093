"""Cases of the ops that hold graphs, and of the markers."""

import numpy as np
from op_families.case import OpCase, call, case, named, random, type_

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.ops import OPS

VEC = type_("f32", 3)


def _cell() -> Graph:
    """(w, carry, x) -> (tanh(w * carry + x), carry): a recurrent cell that stacks its old carry."""
    b = Builder("cell")
    w, carry, x = b.input(VEC), b.input(VEC), b.input(VEC)
    b.output(b(OPS["tanh"], b(OPS["add"], b(OPS["mul"], w, carry), x)))
    b.output(carry)
    return b.build()


def _counter() -> Graph:
    """(carry i32, total u32) -> both stepped, no xs, no ys."""
    b = Builder("counter")
    carry, total = b.input(type_("i32")), b.input(type_("u32"))
    b.output(b(OPS["add"], carry, b.literal(1, named("i32"))))
    b.output(b(OPS["mul"], total, b.literal(3, named("u32"))))
    return b.build()


def _mapper() -> Graph:
    """(scale, x) -> (x * scale, x + [1, 2, 3]): a map, with no carry and a constant."""
    b = Builder("mapper")
    scale, x = b.input(type_("f32")), b.input(VEC)
    b.output(b(OPS["mul"], x, b.expand(scale, (3,))))
    b.output(b(OPS["add"], x, b.literal([1.0, 2.0, 3.0], named("f32"))))
    return b.build()


def _chooser() -> Graph:
    """(carry, which i32) -> (a branch of carry, carry): a cond in a scan, with a constant in a branch."""
    branches = []
    for op, table in (("add", [1.0, 2.0, 3.0]), ("mul", [0.5, -0.5, 0.25])):
        b = Builder(op)
        x = b.input(VEC)
        b.output(b(OPS[op], x, b.literal(table, named("f32"))))
        branches.append(b.build())
    b = Builder("chooser")
    carry, which = b.input(VEC), b.input(type_("i32"))
    b.output(b(OPS["cond"], which, carry, branches=tuple(branches)))
    b.output(carry)
    return b.build()


def _nested() -> OpCase:
    scan = dict(num_consts=0, num_carry=1, length=300, reverse=True)
    which = random("i32", 300)
    return case(
        "scan",
        "nested",
        call(random("f32", 3), which, body=_chooser(), **scan),
        tolerance="rounded",
    )


def _scans() -> OpCase:
    calls = []
    for length in (0, 1, 4, 140):
        for reverse in (False, True):
            cell = dict(num_consts=1, num_carry=1, length=length, reverse=reverse)
            w, start, xs = (
                random("f32", 3),
                random("f32", 3, seed=1),
                random("f32", length, 3, seed=2),
            )
            calls.append(call(w, start, xs, body=_cell(), **cell))
            calls.append(call(w[0], xs, body=_mapper(), **{**cell, "num_carry": 0}))
        counter = dict(num_consts=0, num_carry=2, length=length, reverse=False)
        calls.append(call(np.int32(0), np.uint32(7), body=_counter(), **counter))
    return case("scan", "all", *calls, tolerance="rounded")


def _branch(op: str, swap: bool) -> Graph:
    b = Builder(op)
    x, n = b.input(VEC), b.input(type_("i32"))
    y = b(OPS[op], x)
    b.output(b(OPS["neg"], y) if swap else y)
    b.output(b(OPS["add"], n, n) if swap else n)
    return b.build()


def _conds() -> OpCase:
    two = (_branch("log", False), _branch("exp", True))
    three = (*two, _branch("neg", False))
    x = np.array([-1.0, 0.0, 2.0], np.float32)  # log gives NaN and -inf in the branch not taken
    calls = [call(np.int32(i), x, np.int32(4), branches=two) for i in (0, 1, -3, 7)]
    calls += [call(np.int32(i), x, np.int32(4), branches=three) for i in (0, 1, 2, 9)]
    calls += [call(np.int32(0), x, np.int32(4), branches=two[:1])]
    return case("cond", "all", *calls, tolerance="rounded")


def _whiles() -> OpCase:
    cond = Builder("below")
    limit, n, _ = cond.input(type_("i32")), cond.input(type_("i32")), cond.input(VEC)
    cond.output(cond(OPS["compare"], n, limit, direction="lt"))
    body = Builder("step")
    by, n, x = body.input(VEC), body.input(type_("i32")), body.input(VEC)
    body.output(body(OPS["add"], n, body.literal(1, named("i32"))))
    body.output(body(OPS["mul"], x, by))
    graphs = dict(cond=cond.build(), body=body.build(), cond_nconsts=1, body_nconsts=1)
    calls = [
        call(np.int32(limit), random("f32", 3), np.int32(0), random("f32", 3, seed=1), **graphs)
        for limit in (0, 1, 5)
    ]
    return case("while", "all", *calls, tolerance="rounded")


def _markers() -> list[OpCase]:
    xs = (random("f32", 2, 3), random("u32", 4), np.float32(2))
    marks = [call(*xs, index=0, backward=False), call(xs[0], index=1, backward=True)]
    return [case("boundary", "all", *marks), case("barrier", "all", call(*xs), call(xs[0]))]


CASES = [_scans(), _nested(), _conds(), _whiles(), *_markers()]
