"""Emitters of the ops that hold graphs, and of the markers.

Loops and branches become torch's higher-order ops, whose bodies see nothing but their inputs: constants are passed to
them, and what they return is made contiguous and shares no storage with what they got. A short scan is unrolled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

from plait.backends.torch.constants import constants_of
from plait.backends.torch.emitter import Call, Table
from plait.backends.torch.storage import copied, separate
from plait.core_ir.graph import Graph
from plait.core_ir.ops import control as ops

UNROLLED_STEPS, UNROLLED_EQUATIONS = 16, 256
"""A scan is unrolled up to so many steps, or equations over all steps: compilers see through it then. Beyond, the time
to compile grows, and a loop costs little beside its body."""


class _Body:
    """A graph as a function of tensors, with the constants it holds as operands behind its own."""

    def __init__(self, call: Call, *graphs: Graph) -> None:
        self._run, self._scope = call.scope.run, call.scope
        self._digests = list(dict.fromkeys(c.digest for g in graphs for c in constants_of(g)))
        self.constants = tuple(call.scope.constants[d] for d in self._digests)

    def function(self, graph: Graph) -> Callable[..., list[Tensor]]:
        """`f(*operands of the graph, *constants) -> its outputs`, fit to be the body of a higher-order op."""
        num = len(graph.inputs)

        def body(*operands: Tensor) -> list[Tensor]:
            scope = self._scope.inside(self._digests, operands[num:])
            return separate(self._run(graph, operands[:num], scope), operands)

        return body


def _scan(call: Call, *operands: Tensor) -> Sequence[Tensor]:
    attrs, body = call.attrs, call.attrs["body"]
    num_consts, num_carry, length = attrs["num_consts"], attrs["num_carry"], attrs["length"]
    consts, rest = operands[:num_consts], operands[num_consts:]
    carry, xs = rest[:num_carry], rest[num_carry:]
    if length == 0:
        return (*carry, *(call.empty(v.type) for v in call.eqn.results[num_carry:]))
    if length <= UNROLLED_STEPS or length * len(body.eqns) <= UNROLLED_EQUATIONS:
        return _unrolled(call, body, consts, carry, xs)
    if attrs["reverse"]:
        xs = tuple(torch.flip(x, (0,)) for x in xs)
    if not xs:  # torch's scan takes its length from an operand
        xs = (torch.zeros(length, device=call.device),)
    num_real = len(body.inputs) - num_consts - num_carry
    bodies = _Body(call, body)
    function = bodies.function(body)

    def step(*args: Tensor) -> list[Tensor]:
        own, slices = args[:num_carry], args[num_carry : num_carry + num_real]
        others = args[num_carry + len(xs) :]
        return function(*others[:num_consts], *own, *slices, *others[num_consts:])

    carry, xs = (tuple(copied(x) for x in part) for part in (carry, xs))
    results = scan_op(step, list(carry), list(xs), (*consts, *bodies.constants))
    stacks = results[num_carry:]
    if attrs["reverse"]:
        stacks = [torch.flip(y, (0,)) for y in stacks]
    return (*results[:num_carry], *stacks)


def _unrolled(
    call: Call, body: Graph, consts: Sequence[Tensor], carry: Sequence[Tensor], xs: Sequence[Tensor]
) -> Sequence[Tensor]:
    attrs, num_carry = call.attrs, call.attrs["num_carry"]
    slices: list[list[Tensor]] = []
    for step in range(attrs["length"]):
        index = attrs["length"] - 1 - step if attrs["reverse"] else step
        results = call.scope.run(
            body, [*consts, *carry, *(x.select(0, index) for x in xs)], call.scope
        )
        carry = results[:num_carry]
        slices.append(results[num_carry:])
    if attrs["reverse"]:
        slices.reverse()
    return (*carry, *(torch.stack(ys) for ys in zip(*slices, strict=True)))


def _cond(call: Call, index: Tensor, *operands: Tensor) -> Sequence[Tensor]:
    branches: Sequence[Graph] = call.attrs["branches"]
    if len(branches) == 1:
        return call.scope.run(branches[0], operands, call.scope)
    bodies = _Body(call, *branches)
    functions = [bodies.function(g) for g in branches]

    def choose(first: int, index: Tensor, *args: Tensor) -> list[Tensor]:
        """The branch at `index`, which is at least `first`."""
        if first == len(branches) - 1:
            return functions[first](*args)
        later = first + 1

        def here(index: Tensor, *args: Tensor) -> list[Tensor]:
            return functions[first](*args)

        def beyond(index: Tensor, *args: Tensor) -> list[Tensor]:
            return choose(later, index, *args)

        return list(cond_op(index <= first, here, beyond, (index, *args)))

    return choose(0, index, *operands, *bodies.constants)


def _while(call: Call, *operands: Tensor) -> Sequence[Tensor]:
    attrs = call.attrs
    first = attrs["cond_nconsts"]
    second = first + attrs["body_nconsts"]
    carry = tuple(copied(x) for x in operands[second:])
    num = len(carry)
    if num == 0:
        raise ValueError("a loop that carries nothing either does nothing or never ends")
    bodies = _Body(call, attrs["cond"], attrs["body"])
    condition, body = (bodies.function(attrs[name]) for name in ("cond", "body"))

    def holds(*args: Tensor) -> Tensor:
        own, others = args[:num], args[num:]
        return condition(*others[:first], *own, *others[second:])[0]

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        own, others = args[:num], args[num:]
        return tuple(body(*others[first:second], *own, *others[second:]))

    others: Any = (*operands[:second], *bodies.constants)
    start: Any = carry
    return tuple(while_loop_op(holds, step, start, others))


def _identity(_: Call, *xs: Tensor) -> Sequence[Tensor]:
    return xs


EMITTERS: Table = {
    ops.scan: _scan,
    ops.cond: _cond,
    ops.while_: _while,
    ops.boundary: _identity,
    ops.barrier: _identity,
}
