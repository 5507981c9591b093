"""Control flow, the markers between stages, the barrier, and the way out: `extern`.

Bodies are graphs in attributes; they see nothing but their inputs.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from plait.core_ir.errors import UnsupportedError
from plait.core_ir.op import (
    Array,
    Attr,
    Attrs,
    GraphLike,
    Op,
    Run,
    Types,
    bool_attr,
    free,
    graph_attr,
    graphs_attr,
    int_attr,
    str_attr,
)
from plait.core_ir.types import TensorType, bool_, i32


def _body_flops(graph: Any) -> int:
    """The flops of one run of a graph."""
    return sum(
        eqn.op.flops([v.type for v in eqn.operands], eqn.attrs, [v.type for v in eqn.results])
        for eqn in graph.eqns
    )


# scan


def _scan_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    body: GraphLike = attrs["body"]
    num_consts, num_carry, length = attrs["num_consts"], attrs["num_carry"], attrs["length"]
    scan.require(1, num_consts >= 0 and num_carry >= 0 and length >= 0, dict(attrs))
    scan.require(2, len(types) >= num_consts + num_carry, f"{len(types)} operands")
    whole, xs = types[: num_consts + num_carry], types[num_consts + num_carry :]
    scan.require(3, all(x.shape[:1] == (length,) for x in xs), xs)
    slices = tuple(x.with_shape(x.shape[1:]) for x in xs)
    scan.require(4, body.input_types == (*whole, *slices), (body.input_types, types))
    carry, ys = body.output_types[:num_carry], body.output_types[num_carry:]
    scan.require(5, carry == tuple(whole[num_consts:]), (body.output_types, types))
    return (*carry, *(y.with_shape((length, *y.shape)) for y in ys))


def _scan_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    body: GraphLike = attrs["body"]
    num_consts, num_carry, length = attrs["num_consts"], attrs["num_carry"], attrs["length"]
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    ys = [np.empty((length, *y.shape), y.dtype.numpy) for y in body.output_types[num_carry:]]
    for i in reversed(range(length)) if attrs["reverse"] else range(length):
        results = run(body, [*consts, *carry, *(x[i] for x in xs)])
        carry = results[:num_carry]
        for stack, y in zip(ys, results[num_carry:], strict=True):
            stack[i] = y
    return (*carry, *ys)


scan = Op(
    "scan",
    _scan_infer,
    _scan_evaluate,
    None,
    (
        graph_attr("body"),
        int_attr("num_consts"),
        int_attr("num_carry"),
        int_attr("length"),
        bool_attr("reverse"),
    ),
    (
        "num_consts, num_carry and length are not negative",
        "there are at least num_consts + num_carry operands",
        "dimension 0 of each x has size length",
        "the inputs of body are: consts, carry, one slice of each x",
        "the first num_carry outputs of body have the types of carry",
        "with length 0 the results are carry as given and empty ys",
    ),
    flops=lambda types, attrs, results: attrs["length"] * _body_flops(attrs["body"]),
    doc="(*consts, *carry, *xs) -> (*carry, *ys): body maps consts, carry and the slices of xs at "
    "one index of dimension 0 to the next carry and slices of ys, for index 0, 1, ..., length - 1, "
    "or with reverse=True from the last to the first; y of index i stands at index i either way.",
)


# cond


def _cond_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    branches: tuple[GraphLike, ...] = attrs["branches"]
    cond.require(1, len(types) > 0 and types[0] == TensorType(i32, ()), types[:1])
    for branch in branches:
        cond.require(2, branch.input_types == tuple(types[1:]), (branch.input_types, types[1:]))
        same = branch.output_types == branches[0].output_types
        cond.require(3, same, (branch.output_types, branches[0].output_types))
    return branches[0].output_types


def _cond_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    branches = attrs["branches"]
    index = min(max(int(operands[0]), 0), len(branches) - 1)
    return run(branches[index], operands[1:])


cond = Op(
    "cond",
    _cond_infer,
    _cond_evaluate,
    None,
    (graphs_attr("branches"),),
    (
        "the first operand, the index, is i32[]",
        "the inputs of each branch are the other operands",
        "the branches have the same output types",
        "an index below 0 takes branch 0, one beyond the last branch takes the last",
    ),
    flops=lambda types, attrs, results: max(map(_body_flops, attrs["branches"])),
    doc="(index, *operands) -> the outputs of branch `index`; only that branch runs. Of two "
    "branches, 0 is false and 1 is true. Its flops are those of the costliest branch.",
)


# while


def _while_parts(operands: Sequence[Any], attrs: Attrs) -> tuple[list[Any], list[Any], list[Any]]:
    """(consts of cond, consts of body, carry)."""
    first, second = attrs["cond_nconsts"], attrs["cond_nconsts"] + attrs["body_nconsts"]
    return list(operands[:first]), list(operands[first:second]), list(operands[second:])


def _while_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    condition, body = attrs["cond"], attrs["body"]
    counts = attrs["cond_nconsts"], attrs["body_nconsts"]
    while_.require(1, min(counts) >= 0 and len(types) >= sum(counts), (counts, types))
    cond_consts, body_consts, carry = _while_parts(types, attrs)
    fits = condition.input_types == (*cond_consts, *carry)
    while_.require(2, fits, (condition.input_types, types))
    while_.require(3, condition.output_types == (TensorType(bool_, ()),), condition.output_types)
    while_.require(4, body.input_types == (*body_consts, *carry), (body.input_types, types))
    while_.require(5, body.output_types == tuple(carry), (body.output_types, carry))
    return tuple(carry)


def _while_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    cond_consts, body_consts, carry = _while_parts(operands, attrs)
    while run(attrs["cond"], [*cond_consts, *carry])[0]:
        carry = run(attrs["body"], [*body_consts, *carry])
    return carry


while_ = Op(
    "while",
    _while_infer,
    _while_evaluate,
    None,
    (graph_attr("cond"), graph_attr("body"), int_attr("cond_nconsts"), int_attr("body_nconsts")),
    (
        "cond_nconsts and body_nconsts are not negative, and there are at least as many operands",
        "the inputs of cond are: its consts, carry",
        "the output of cond is bool[]",
        "the inputs of body are: its consts, carry",
        "the outputs of body have the types of carry",
    ),
    flops=lambda types, attrs, results: _body_flops(attrs["cond"]) + _body_flops(attrs["body"]),
    doc="(*cond_consts, *body_consts, *carry) -> carry after body has run as often as cond holds "
    "before it. The number of rounds is unknown; its flops are those of one.",
)


# boundary, barrier, extern


def _identity(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    return tuple(operands)


def _boundary_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    boundary.require(1, attrs["index"] >= 0, attrs["index"])
    return tuple(types)


boundary = Op(
    "boundary",
    _boundary_infer,
    _identity,
    None,
    (int_attr("index"), bool_attr("backward")),
    ("index >= 0",),
    flops=free,
    doc="(*xs) -> xs: the cut between stage `index` and stage `index + 1`; what crosses it "
    "forward, or with backward=True the cotangents that cross it back.",
)

barrier = Op(
    "barrier",
    lambda types, attrs: tuple(types),
    _identity,
    None,
    flops=free,
    doc="(*xs) -> xs: whatever reads a result is computed after all operands, and what reads a "
    "result is never merged with what reads the operand itself.",
)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _extern_infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    framework, _, name = attrs["target"].partition(":")
    extern.require(1, framework in ("torch", "jax") and bool(name), attrs["target"])
    extern.require(2, _is_json(attrs["spec"]), attrs["spec"])
    results: tuple[TensorType, ...] = attrs["results"]
    return results


def _extern_evaluate(operands: Sequence[Array], attrs: Attrs, run: Run) -> Sequence[Array]:
    framework = attrs["target"].partition(":")[0]
    raise UnsupportedError(
        f"extern {attrs['target']} has no meaning in NumPy; it runs on the {framework} backend only"
    )


extern = Op(
    "extern",
    _extern_infer,
    _extern_evaluate,
    None,
    (
        str_attr("target"),
        Attr(
            "results",
            lambda v: isinstance(v, tuple) and all(type(t) is TensorType for t in v),
            "a tuple of tensor types",
        ),
        str_attr("spec"),
        bool_attr("effect", optional=True),
    ),
    ("target is torch:NAME or jax:NAME", "spec is JSON"),
    doc="(*xs) -> `results`: a call of an op of one framework that has no lowering. `spec` says "
    "how operands and static arguments make that call. It runs on its own framework's backend "
    "only; with effect=True it is never merged, dropped or reordered.",
)

FAMILY: tuple[Op, ...] = (scan, cond, while_, boundary, barrier, extern)
