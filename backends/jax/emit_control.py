"""Emitters of control flow, markers, the barrier and calls of JAX functions by name."""

from collections.abc import Sequence

import jax
from jax import lax

from plait.backends.jax.emit_annotation import ANNOTATION, annotated
from plait.backends.jax.private import barrier
from plait.backends.jax.rule import Emit, Emitter, Table
from plait.core_ir import externs
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Eqn
from plait.core_ir.ops import control as ops

Arrays = Sequence[jax.Array]


def _scan(emit: Emit) -> Emitter:
    def rule(eqn: Eqn, operands: Arrays) -> Arrays:
        attrs = eqn.attrs
        body = emit(attrs["body"])
        num_consts, num_carry = attrs["num_consts"], attrs["num_carry"]
        consts = operands[:num_consts]
        start = tuple(operands[num_consts : num_consts + num_carry])
        xs = tuple(operands[num_consts + num_carry :])

        def step(
            carry: tuple[jax.Array, ...], x: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, ...], Arrays]:
            results = body(*consts, *carry, *x)
            return results[:num_carry], results[num_carry:]

        carry, ys = lax.scan(step, start, xs, length=attrs["length"], reverse=attrs["reverse"])
        return (*carry, *ys)

    return rule


def _cond(emit: Emit) -> Emitter:
    def rule(eqn: Eqn, operands: Arrays) -> Arrays:
        branches = [emit(branch) for branch in eqn.attrs["branches"]]
        return tuple(lax.switch(operands[0], branches, *operands[1:]))

    return rule


def _while(emit: Emit) -> Emitter:
    def rule(eqn: Eqn, operands: Arrays) -> Arrays:
        attrs = eqn.attrs
        condition, body = emit(attrs["cond"]), emit(attrs["body"])
        first = attrs["cond_nconsts"]
        second = first + attrs["body_nconsts"]
        return lax.while_loop(
            lambda carry: condition(*operands[:first], *carry)[0],
            lambda carry: body(*operands[first:second], *carry),
            tuple(operands[second:]),
        )

    return rule


def _identity(_: Eqn, operands: Arrays) -> Arrays:
    return operands


def _barrier(_: Eqn, operands: Arrays) -> Arrays:
    return barrier(operands)


def _extern(eqn: Eqn, operands: Arrays) -> Arrays:
    """A JAX function that capture kept as one call, as the process that captured it knows it."""
    target: str = eqn.attrs["target"]
    framework = target.partition(":")[0]
    if framework != "jax":
        raise UnsupportedError(
            f"{eqn.source}: the JAX backend cannot run {target}, an op of {framework} that has no lowering; "
            f'use ops that have one, or backend="{framework}"'
        )
    if target == ANNOTATION:
        return annotated(eqn, operands)
    call = externs.lookup(target, eqn.attrs["spec"])
    wide = any(v.type.dtype.itemsize == 8 for v in (*eqn.operands, *eqn.results))
    with jax.enable_x64(wide):  # as it was when the function was captured
        return call(*operands)


def table(emit: Emit) -> Table:
    """The emitters; `emit` emits the graphs that stand in attributes."""
    return {
        ops.scan: _scan(emit),
        ops.cond: _cond(emit),
        ops.while_: _while(emit),
        ops.boundary: _identity,
        ops.barrier: _barrier,
        ops.extern: _extern,
    }
