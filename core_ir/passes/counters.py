"""Buffers that count: those that replicas of a model may change, each by what its own parts of the batch add.

Along a data axis that the program does not name, replicas know nothing of each other, and a buffer can only change if
the end of a step does not depend on which replica ran which part, in which order:

    %counts2 = add(%counts, %new)      where `%counts` and `%counts2` are read by nothing else

(or `sub`, or a `scatter` that adds). Every replica may then start from zero, and what all of them counted is added to
what stood there. Along a data axis that the program names, ranks hold what it says, which must be the same on all of
them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.mesh import Layout, Mesh, axes_of
from plait.core_ir.ops.elementwise import add, sub
from plait.core_ir.ops.index import scatter
from plait.core_ir.passes.varying import NOWHERE, Axes, varying
from plait.core_ir.program import Program


def counters(program: Program, mesh: Mesh, layouts: Mapping[str, Layout]) -> frozenset[str]:
    """The buffers that a mesh's replicas are to count in from zero.

    UnsupportedError for a buffer that changes in another way, where microbatches are cut over data axes.
    """
    if mesh.num_parts == 1:
        return frozenset()
    apart = mesh.replica_axes
    together = frozenset(mesh.data_axes).difference(apart)
    if together:
        _check_alike(program, together, layouts)
    if not apart:
        return frozenset()
    num_readers = Counter(
        name
        for stage in program.stages
        for task in stage.tasks.values()
        for name, _ in task.inputs_of("buffer")
    )
    found = set[str]()
    for stage in program.stages:
        forward = stage.tasks["F"]
        before, readers = dict(forward.inputs_of("buffer")), _readers(forward)
        outputs = Counter(forward.outputs)
        for name, after in forward.outputs_of("buffer_update"):
            is_read_once = num_readers[name] == 1 and name in before
            if not is_read_once or not _is_sum(before[name], after, readers, outputs):
                raise UnsupportedError(
                    f"stage {stage.index}: buffer {name!r} changes from microbatch to microbatch, and each replica "
                    f"along {', '.join(map(repr, apart))} would have its own; only a buffer that a forward adds to in "
                    "the buffer's dtype (+=, -=, index_add_, scatter_add_; in JAX s + x, s.at[i].add(x)), outside "
                    "loops and branches, and that nothing else reads, is added up over replicas: write it so, keep it "
                    "fixed (eval mode, or a norm without running statistics), or leave the mesh to the stages"
                )
            found.add(name)
    return frozenset(found)


def _readers(graph: Graph) -> dict[Value, list[Eqn]]:
    """The equations that read each value, one as often as it does."""
    found: dict[Value, list[Eqn]] = {}
    for eqn in graph.eqns:
        for value in eqn.operands:
            found.setdefault(value, []).append(eqn)
    return found


def _is_sum(
    value: Value, after: Value, readers: Mapping[Value, Sequence[Eqn]], outputs: Mapping[Value, int]
) -> bool:
    """Whether what a buffer is after a forward is its value and what is added to that, and nothing on the way is read.

    outputs: how often each value is given.
    """
    while not outputs.get(value):
        match readers.get(value, ()):
            case [eqn] if _adds_to(eqn, value):
                value = eqn.result
            case _:
                return False
    return value is after and outputs[value] == 1 and not readers.get(value)


def _adds_to(eqn: Eqn, value: Value) -> bool:
    """Whether an equation gives a value and something else, added up."""
    if eqn.op is scatter and eqn.attrs["kind"] != "add":
        return False
    return eqn.op is add or (eqn.op in (sub, scatter) and eqn.operands[0] is value)


def _check_alike(program: Program, axes: Axes, layouts: Mapping[str, Layout]) -> None:
    """UnsupportedError for a buffer that changes, and comes to differ along some of the axes."""
    sent: dict[tuple[int, Port], Axes] = {}
    for stage in program.stages:
        forward = stage.tasks["F"]
        given = [
            sent.get((stage.index, port), _given(port, value, axes, layouts))
            for port, value in zip(forward.input_ports, forward.inputs, strict=True)
        ]
        found = varying(forward, given)
        made = dict(zip(forward.output_ports, forward.outputs, strict=True))
        for edge in program.edges_from(stage.index, "activation"):
            sent[edge.target, edge.input] = found[made[edge.output]]
        for name, value in forward.outputs_of("buffer_update"):
            differs = sorted(found[value] & axes)
            if differs:
                raise UnsupportedError(
                    f"stage {stage.index}: buffer {name!r} changes from microbatch to microbatch, and ranks along "
                    f"{', '.join(map(repr, differs))}, each with its part of the batch, would have a value of their "
                    "own each; add up over them what changes it (an all_reduce), or keep it fixed (eval mode)"
                )


def _given(port: Port, value: Value, axes: Axes, layouts: Mapping[str, Layout]) -> Axes:
    """How an input varies that no other stage sends."""
    if port.role in ("param", "buffer"):
        return frozenset(axes_of(layouts.get(port.name, ())))
    if port.role == "rng_key" or (port.role == "batch" and value.type.rank):
        return axes
    return NOWHERE
