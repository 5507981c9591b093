"""A joint program taken apart: its forward, its backward, and markers that hold one value each.

Forward is what loss, aux and buffer updates need; backward is what the parameter gradients need beyond that. Effects
that no output needs stand in the forward when they do not depend on the cotangent of the loss. Values
that depend on the cotangent of the loss are *gradients*; the rest of the backward recomputes from forward values.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from plait.core_ir.errors import PartitionError
from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.ops.control import boundary
from plait.core_ir.passes.equations import nested_graphs, pinned_equations

_FORWARD_ROLES = ("loss", "aux", "buffer_update")


@dataclass(frozen=True)
class Joint:
    """A joint program taken apart. Every `boundary` has one operand.

    forward holds forward markers only, backward holds backward markers over gradients only.
    gradients: the values that depend on `loss_grad`, that input among them.
    """

    name: str
    num_stages: int
    inputs: Mapping[Value, Port]
    outputs: tuple[tuple[Port, Value], ...]
    forward: tuple[Eqn, ...]
    backward: tuple[Eqn, ...]
    gradients: frozenset[Value]

    def outputs_of(self, *roles: str) -> Iterator[tuple[Port, Value]]:
        """The outputs of some roles."""
        return ((port, value) for port, value in self.outputs if port.role in roles)


def take_apart(graph: Graph, num_stages: int) -> Joint:
    """Forward and backward of a joint program.

    A marker met in recomputation (a forward marker outside the forward) stands for the value that crossed there; a
    backward marker over something that is no gradient (a zero) is dropped.

    Raises PartitionError where a marker has no stage behind it or stands inside control flow, and where an output of
    the forward depends on the cotangent of the loss.
    """
    leaf_of: dict[Eqn, int] = {}
    eqns = tuple(_leaf_by_leaf(graph, num_stages, leaf_of))
    inputs = dict(zip(graph.inputs, graph.input_ports, strict=True))
    outputs = tuple(zip(graph.output_ports, graph.outputs, strict=True))
    gradients = _gradients(inputs, eqns)

    wanted = {value for port, value in outputs if port.role in _FORWARD_ROLES}
    untouched = [e for e in eqns if not any(o in gradients for o in e.operands)]
    for port, value in outputs:
        if port.role in _FORWARD_ROLES and value in gradients:
            raise PartitionError(f"output {port} depends on the cotangent of the loss")
    pinned = pinned_equations(eqns, graph.outputs)
    forward = _needed(untouched, wanted, pinned)
    same = _crossed_values(leaf_of, forward, gradients)
    rest: list[Eqn] = []
    for original in eqns:
        if original in forward or any(r in same for r in original.results):
            continue
        eqn = original.with_operands([same.get(o, o) for o in original.operands])
        rest.append(eqn)
        if original in pinned:
            pinned.add(eqn)
    outputs = tuple((port, same.get(value, value)) for port, value in outputs)
    backward = _needed(rest, {value for _, value in outputs}, pinned)
    return Joint(
        graph.name,
        num_stages,
        inputs,
        outputs,
        tuple(e for e in eqns if e in forward),
        tuple(e for e in rest if e in backward),
        gradients,
    )


def _leaf_by_leaf(graph: Graph, num_stages: int, leaf_of: dict[Eqn, int]) -> Iterator[Eqn]:
    """The equations, with every marker split into markers of one value, recorded in `leaf_of`."""
    for eqn in graph.eqns:
        if eqn.op is not boundary:
            for nested in nested_graphs(eqn):
                if marker := next((e for e in nested.eqns if e.op is boundary), None):
                    raise PartitionError(
                        f"a stage boundary stands inside {eqn.op.name} ({marker.source}); it can be cut only when"
                        " unrolled: move the boundary out of the loop or branch"
                    )
            yield eqn
            continue
        if eqn.attrs["index"] >= num_stages - 1:
            raise PartitionError(
                f"boundary {eqn.attrs['index']} ({eqn.source}) has no stage behind it: {num_stages} stages were asked"
                f" for, which have the cuts 0 to {num_stages - 2}"
            )
        for leaf, (operand, result) in enumerate(zip(eqn.operands, eqn.results, strict=True)):
            marker = Eqn(boundary, (operand,), eqn.attrs, (result,), eqn.source)
            leaf_of[marker] = leaf
            yield marker


def _gradients(inputs: Mapping[Value, Port], eqns: Iterable[Eqn]) -> frozenset[Value]:
    found = {value for value, port in inputs.items() if port.role == "loss_grad"}
    for eqn in eqns:
        if any(o in found for o in eqn.operands):
            found.update(eqn.results)
    return frozenset(found)


def _needed(eqns: list[Eqn], wanted: set[Value], pinned: set[Eqn]) -> set[Eqn]:
    """The equations that give wanted values or are pinned, and all they need."""
    wanted = set(wanted)
    needed: set[Eqn] = set()
    for eqn in reversed(eqns):
        if any(r in wanted for r in eqn.results) or eqn in pinned:
            needed.add(eqn)
            wanted.update(eqn.operands)
    return needed


def _crossed_values(
    leaf_of: Mapping[Eqn, int], forward: set[Eqn], gradients: frozenset[Value]
) -> dict[Value, Value]:
    """What the result of each marker that does not cut stands for."""
    crossed = {(e.attrs["index"], leaf): e.result for e, leaf in leaf_of.items() if e in forward}
    same: dict[Value, Value] = {}
    for marker, leaf in leaf_of.items():
        (operand,), is_gradient = marker.operands, marker.result in gradients
        if marker in forward or (marker.attrs["backward"] and is_gradient):
            continue
        value = same.get(operand, operand)
        if not marker.attrs["backward"] and not is_gradient:
            value = crossed.get((marker.attrs["index"], leaf), value)
        same[marker.result] = value
    return same
