"""Join a forward and a backward into one graph, so that one half's communication can hide behind the other's compute.

    graph @a.forward(%x) -> (%y) {...}             graph @b.backward_a.forward(%g, %x) -> (%dx, %y) {
                                             ->      ...the backward's equations, then the forward's
    graph @b.backward(%g) -> (%dx) {...}           }

A disjoint union: the halves belong to different microbatches and read nothing of each other. Both calling conventions
are kept: inputs and outputs are the backward's, then the forward's. Names of ports get the half in front, since both
halves may read one parameter, or belong to one stage.
"""

from collections.abc import Iterable
from dataclasses import replace

from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.program import Program


def multiplex(forward: Graph, backward: Graph) -> Graph:
    """One graph of two. The order of equations is the backward's, then the forward's: `overlap` mixes them.

    Raises `VerifyError` where one half reads what the other makes: such halves have to run one after the other.
    """
    made = {"forward": _made(forward), "backward": _made(backward)}
    for reader, maker in ((forward, "backward"), (backward, "forward")):
        for port, value in zip(reader.input_ports, reader.inputs, strict=True):
            if value in made[maker]:
                raise VerifyError(
                    f"cannot multiplex {forward.name} with {backward.name}: {reader.name} reads {port} {value!r}, "
                    f"which the {maker} makes; run them one after the other, or pair it with another stage's backward"
                )
    forward = _fresh(forward)  # tasks of equal structure share their values
    return Graph(
        f"{backward.name}_{forward.name}",
        (*backward.inputs, *forward.inputs),
        (*backward.eqns, *forward.eqns),
        (*backward.outputs, *forward.outputs),
        (
            *_named("backward", backward.input_ports),
            *_named("forward", forward.input_ports),
        ),
        (
            *_named("backward", backward.output_ports),
            *_named("forward", forward.output_ports),
        ),
    )


def multiplex_pairs(program: Program, pairs: Iterable[tuple[int, int]]) -> Program:
    """The program with a task F&B for each (forward stage, backward stage), in order."""
    tasks = {
        (forward, backward): multiplex(program.task(forward, "F"), program.task(backward, "B"))
        for forward, backward in sorted(set(pairs))
    }
    return replace(program, pairs=tasks)


def _made(graph: Graph) -> set[Value]:
    return {result for eqn in graph.eqns for result in eqn.results}


def _named(half: str, ports: Iterable[Port]) -> Iterable[Port]:
    return (Port(p.role, f"{half}.{p.name}" if p.name else half) if p.role else p for p in ports)


def _fresh(graph: Graph) -> Graph:
    """The graph over values of its own."""
    own: dict[Value, Value] = {}

    def copied(value: Value) -> Value:
        return own.setdefault(value, Value(value.type, value.name))

    return replace(
        graph,
        inputs=tuple(map(copied, graph.inputs)),
        eqns=tuple(
            Eqn(
                eqn.op,
                tuple(map(copied, eqn.operands)),
                eqn.attrs,
                tuple(map(copied, eqn.results)),
                eqn.source,
            )
            for eqn in graph.eqns
        ),
        outputs=tuple(map(copied, graph.outputs)),
    )
