"""Joint programs for tests: a small reverse mode over a Builder, and a runner of programs in NumPy.

A test writes a forward with a Builder; `differentiate` appends its backward as a frontend would deliver it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Role, Value
from plait.core_ir.interpret import interpret
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.op import Array, Op
from plait.core_ir.ops import collective
from plait.core_ir.ops.control import boundary
from plait.core_ir.ops.elementwise import add, cos, exp, mul, neg, sin, sub, tanh
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.ops.shape import broadcast, reshape, transpose
from plait.core_ir.program import Program
from plait.core_ir.types import DType, TensorType, f64

Grads = list[Value | None]
Inputs = Mapping[tuple[str, str], Array]
Run = Callable[[Graph, Sequence[Array]], list[Array]]


def matmul(b: Builder, x: Value, w: Value) -> Value:
    """x w, for matrices."""
    return b(dot_general, x, w, batch=((), ()), contract=((1,), (0,)))


def total(b: Builder, x: Value) -> Value:
    """The sum of all elements."""
    return b(reduce_sum, x, dims=tuple(range(x.type.rank)))


def cut(b: Builder, index: int, *values: Value) -> tuple[Value, ...]:
    """A forward marker."""
    return b.emit(boundary, *values, index=index, backward=False)


def _dot_grads(b: Builder, eqn: Eqn, g: Value) -> Grads:
    x, w = eqn.operands
    return [
        b(dot_general, g, w, batch=((), ()), contract=((1,), (1,))),
        b(dot_general, x, g, batch=((), ()), contract=((0,), (0,))),
    ]


def _transpose_grads(b: Builder, eqn: Eqn, g: Value) -> Grads:
    permutation = eqn.attrs["permutation"]
    return [b.transpose(g, tuple(permutation.index(i) for i in range(len(permutation))))]


def _broadcast_grads(b: Builder, eqn: Eqn, g: Value) -> Grads:
    (x,), dims = eqn.operands, eqn.attrs["dims"]
    spread = tuple(d for i, d in enumerate(dims) if x.type.shape[i] != g.type.shape[d])
    new = tuple(d for d in range(g.type.rank) if d not in dims)
    summed = b(reduce_sum, g, dims=tuple(sorted(spread + new))) if spread + new else g
    return [b.reshape(summed, x.type.shape)]


def _sum_grads(b: Builder, eqn: Eqn, g: Value) -> Grads:
    (x,) = eqn.operands
    kept = tuple(d for d in range(x.type.rank) if d not in eqn.attrs["dims"])
    return [b.expand(g, x.type.shape, kept)]


def together(b: Builder, op: Op, x: Value, **attrs: Any) -> Value:
    """A collective and its wait."""
    return b(collective.wait, b(op, x, **attrs))


def _collective_grads(op: Op, *names: str) -> Callable[[Builder, Eqn, Value], Grads]:
    """`op` over the same axis, with attributes of these names."""

    def rule(b: Builder, eqn: Eqn, g: Value) -> Grads:
        attrs = {name: eqn.attrs[name] for name in ("axis", "size", *names) if name in eqn.attrs}
        if op is collective.reduce_scatter:
            attrs["reduction"] = "sum"
        return [together(b, op, g, **attrs)]

    return rule


RULES: dict[Op, Callable[[Builder, Eqn, Value], Grads]] = {
    add: lambda b, eqn, g: [g, g],
    sub: lambda b, eqn, g: [g, b(neg, g)],
    mul: lambda b, eqn, g: [b(mul, g, eqn.operands[1]), b(mul, g, eqn.operands[0])],
    neg: lambda b, eqn, g: [b(neg, g)],
    sin: lambda b, eqn, g: [b(mul, g, b(cos, eqn.operands[0]))],
    exp: lambda b, eqn, g: [b(mul, g, eqn.result)],
    tanh: lambda b, eqn, g: [
        b(sub, g, b(mul, b(mul, g, eqn.result), eqn.result)),
    ],
    dot_general: _dot_grads,
    transpose: _transpose_grads,
    reshape: lambda b, eqn, g: [b.reshape(g, eqn.operands[0].type.shape)],
    broadcast: _broadcast_grads,
    reduce_sum: _sum_grads,
    collective.wait: lambda b, eqn, g: [g],
    collective.all_reduce: _collective_grads(collective.all_reduce, "reduction"),
    collective.all_gather: _collective_grads(collective.reduce_scatter, "dim"),
    collective.reduce_scatter: _collective_grads(collective.all_gather, "dim"),
}


def differentiate(b: Builder, loss: Value, params: Mapping[str, Value]) -> Graph:
    """The joint graph: the loss, and the gradient of each parameter that it depends on."""
    eqns = list(b.build().eqns)
    b.output(loss, "loss", "")
    active = set(params.values())
    for eqn in eqns:
        if any(o in active for o in eqn.operands):
            active.update(eqn.results)
    grads: dict[Value, Value] = {loss: b.input(loss.type, "loss_grad", "")}

    def accumulate(value: Value, grad: Value | None) -> None:
        if grad is not None and value in active:
            grads[value] = b(add, grads[value], grad) if value in grads else grad

    for eqn in reversed(eqns):
        if eqn.op is boundary:
            pairs = [
                (o, grads[r]) for o, r in zip(eqn.operands, eqn.results, strict=True) if r in grads
            ]
            crossed = b.emit(
                boundary, *(g for _, g in pairs), index=eqn.attrs["index"], backward=True
            )
            for (operand, _), grad in zip(pairs, crossed, strict=True):
                accumulate(operand, grad)
        elif any(r in grads for r in eqn.results):
            for operand, grad in zip(
                eqn.operands, RULES[eqn.op](b, eqn, grads[eqn.result]), strict=True
            ):
                accumulate(operand, grad)
    for name, value in params.items():
        if value in grads:
            b.output(grads[value], "param_grad", name)
    return b.build()


def matrix(b: Builder, role: Role, name: str, *shape: int, dtype: DType = f64) -> Value:
    """An input, f64 unless said otherwise."""
    return b.input(TensorType(dtype, shape), role, name)


def random_inputs(graph: Graph, seed: int = 0) -> dict[tuple[str, str], Array]:
    """Small random numbers for every input."""
    rng = np.random.default_rng(seed)
    inputs: dict[tuple[str, str], Array] = {}
    for port, value in zip(graph.input_ports, graph.inputs, strict=True):
        kind = value.type.dtype.kind
        array = (
            rng.standard_normal(value.type.shape)
            if kind == "float"
            else rng.integers(0, 4, value.type.shape)
        )
        inputs[port.role, port.name] = array.astype(value.type.dtype.numpy)
    return inputs


def over_ranks(mesh: Mapping[str, int]) -> Run:
    """Runs a graph on all ranks of a mesh; arrays have one more dimension in front, of ranks."""
    num_ranks = math.prod(mesh.values())

    def run(graph: Graph, operands: Sequence[Array]) -> list[Array]:
        by_rank = [[np.asarray(x[rank]) for x in operands] for rank in range(num_ranks)]
        results = interpret_ranks(graph, by_rank, mesh)
        return [np.stack(of_ranks) for of_ranks in zip(*results, strict=True)]

    return run


def run_joint(graph: Graph, inputs: Inputs, run: Run = interpret) -> dict[tuple[str, str], Array]:
    """Outputs of a joint graph by role and name."""
    arrays = run(graph, [inputs[p.role, p.name] for p in graph.input_ports])
    return {(p.role, p.name): a for p, a in zip(graph.output_ports, arrays, strict=True)}


def run_program(
    program: Program, inputs: Inputs, backward: Sequence[str] = ("B",), execute: Run = interpret
) -> dict[tuple[str, str], Array]:
    """Outputs of a program run task by task: all F, then each stage's `backward` tasks, last stage first.

    Parts of a parameter's gradient are added in stage order.
    """
    received: dict[tuple[int, object], Array] = {}
    environments: list[dict[object, Array]] = [{} for _ in program.stages]
    parts: dict[tuple[str, str], dict[int, Array]] = {}

    def run(stage: int, kind: str) -> None:
        graph, env = program.task(stage, kind), environments[stage]  # type: ignore[arg-type]
        operands = []
        for port in graph.input_ports:
            if port in env:
                operands.append(env[port])
            elif (stage, port) in received:
                operands.append(received[stage, port])
            else:
                operands.append(inputs[port.role, port.name])
        written = dict(zip(graph.output_ports, execute(graph, operands), strict=True))
        env.update(written)
        for port, array in written.items():
            if port.role in ("loss", "aux", "buffer_update", "param_grad"):
                assert stage not in parts.setdefault((port.role, port.name), {})
                parts[port.role, port.name][stage] = array
        for edge in (
            *program.edges_from(stage, "activation"),
            *program.edges_from(stage, "gradient"),
        ):
            if edge.output in written:
                received[edge.target, edge.input] = written[edge.output]

    for stage in range(program.num_stages):
        run(stage, "F")
    for stage in reversed(range(program.num_stages)):
        for kind in backward:
            run(stage, kind)
    return {port: sum_in_order(found) for port, found in parts.items()}


def sum_in_order(found: Mapping[int, Array]) -> Array:
    """The sum of parts by stage number."""
    first, *rest = (found[stage] for stage in sorted(found))
    for part in rest:
        first = first + part
    return first
