"""Whether a graph, and a program, is well formed. Linear in their size."""

from collections import Counter
from collections.abc import Iterator

from plait.core_ir.errors import TypeRuleError, VerifyError
from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.program import STEP_KINDS, Edge, Program, Stage
from plait.core_ir.types import AsyncType, TensorType


def verify(graph: Graph) -> Graph:
    """The graph itself; VerifyError where a value is undefined or defined twice, or a type is not what its op says."""
    defined: set[Value] = set()
    for value, port in zip(graph.inputs, graph.input_ports, strict=True):
        if value in defined:
            raise VerifyError(f"graph {graph.name}: input {port} {value!r} is defined twice")
        defined.add(value)
    for position, eqn in enumerate(graph.eqns):
        _verify_eqn(graph, position, eqn, defined)
        defined.update(eqn.results)
    for value, port in zip(graph.outputs, graph.output_ports, strict=True):
        if value not in defined:
            raise VerifyError(f"graph {graph.name}: output {port} {value!r} is not defined")
    _verify_async(graph)
    _verify_ports(graph, "input", graph.input_ports)
    _verify_ports(graph, "output", graph.output_ports)
    return graph


def _verify_eqn(graph: Graph, position: int, eqn: Eqn, defined: set[Value]) -> None:
    where = f"graph {graph.name}, equation {position} ({eqn.op.name}, {eqn.source})"
    for operand in eqn.operands:
        if operand not in defined:
            raise VerifyError(f"{where}: operand {operand!r} is not defined before it is used")
    for result in eqn.results:
        if result in defined:
            raise VerifyError(f"{where}: result {result!r} is defined twice")
    if len(set(eqn.results)) != len(eqn.results):
        raise VerifyError(f"{where}: one value stands twice among the results")
    try:
        types = eqn.op.types([v.type for v in eqn.operands], eqn.attrs)
    except TypeRuleError as error:
        raise VerifyError(f"{where}: {error}") from None
    found = tuple(v.type for v in eqn.results)
    if types != found:
        raise VerifyError(f"{where}: results should be {list(types)}, are {list(found)}")
    for attr in eqn.attrs.values():
        for nested in attr if isinstance(attr, tuple) else (attr,):
            if isinstance(nested, Graph):
                verify(nested)


def _verify_async(graph: Graph) -> None:
    """Each async value is read by one `wait`, and is neither input nor output (`Op.types` keeps it from other ops)."""
    sides = (
        ("input", graph.inputs, graph.input_ports),
        ("output", graph.outputs, graph.output_ports),
    )
    for side, values, ports in sides:
        for value, port in zip(values, ports, strict=True):
            if isinstance(value.type, AsyncType):
                raise VerifyError(
                    f"graph {graph.name}: {side} {port} {value!r} is async; a collective is waited for in the graph "
                    "that starts it, and the result of the wait is what leaves"
                )
    started = {r: e for e in graph.eqns for r in e.results if isinstance(r.type, AsyncType)}
    if not started:
        return
    num_waits = Counter(o for e in graph.eqns for o in e.operands if o in started)
    for value, eqn in started.items():
        if num_waits[value] != 1:
            raise VerifyError(
                f"graph {graph.name}: {value!r} of {eqn.op.name} ({eqn.source}) is read {num_waits[value]} times; an "
                "async value is read by exactly one wait"
            )


def _verify_ports(graph: Graph, side: str, ports: tuple[Port, ...]) -> None:
    named = [p for p in ports if p.role]
    if len(set(named)) != len(named):
        seen: set[Port] = set()
        twice = next(p for p in named if p in seen or seen.add(p))  # type: ignore[func-returns-value]
        raise VerifyError(f"graph {graph.name}: two {side}s are {twice}")


def verify_program(program: Program) -> Program:
    """The program itself; VerifyError where a task is malformed, an edge does not fit, or a port is never written."""
    for stage in program.stages:
        for graph in stage.tasks.values():
            verify(graph)
    for edge in program.edges:
        _verify_edge(program, edge)
    received = {(e.target, e.input) for e in program.edges}
    for stage in program.stages:
        _verify_flow(program, stage, received)
        _verify_sharding(program, stage)
    for pair, graph in program.pairs.items():
        _verify_pair(program, pair, verify(graph))
    return program


def _verify_pair(program: Program, pair: tuple[int, int], graph: Graph) -> None:
    forward, backward = program.task(pair[0], "F"), program.task(pair[1], "B")
    for side, found, wanted in (
        ("inputs", graph.input_types, (*backward.input_types, *forward.input_types)),
        ("outputs", graph.output_types, (*backward.output_types, *forward.output_types)),
    ):
        if found != wanted:
            raise VerifyError(
                f"pair of stage {pair[0]}'s forward and stage {pair[1]}'s backward: its {side} must be those of "
                f"{backward.name}, then those of {forward.name}; expected {list(wanted)}, found {list(found)}"
            )


def _verify_sharding(program: Program, stage: Stage) -> None:
    """UNSHARD makes parameters that the stage reads, each of its shard; REDUCE_GRAD reads gradients that it gives."""
    unshard, reduce_grad = stage.tasks.get("UNSHARD"), stage.tasks.get("REDUCE_GRAD")
    rest = [graph for kind, graph in stage.tasks.items() if kind not in STEP_KINDS]
    where = f"program {program.name}, stage {stage.index}"
    shards: dict[str, TensorType] = {}
    if unshard is not None:
        shards = dict(_verify_step_task(where, unshard, "shard", "param"))
        read = {name: value.type for graph in rest for name, value in graph.inputs_of("param")}
        for name, value in unshard.outputs_of("param"):
            if read.get(name) != value.type:
                raise VerifyError(
                    f"{where}, task UNSHARD: gives param {name!r} as {value.type}, the stage reads "
                    f"{read.get(name, 'no such parameter')}"
                )
    if reduce_grad is not None:
        made = {n: value.type for graph in rest for n, value in graph.outputs_of("param_grad")}
        reduced = dict(_verify_step_task(where, reduce_grad, "param_grad", "shard_grad"))
        for name, found in reduced.items():
            if made.get(name) != found:
                raise VerifyError(
                    f"{where}, task REDUCE_GRAD: reads the gradient of {name!r} as {found}, the stage gives "
                    f"{made.get(name, 'no such gradient')}"
                )
        for name, value in reduce_grad.outputs_of("shard_grad"):
            if name in shards and value.type != shards[name]:
                raise VerifyError(
                    f"{where}, task REDUCE_GRAD: gives the gradient of {name!r} as {value.type}, its shard is "
                    f"{shards[name]}"
                )


def _verify_step_task(
    where: str, graph: Graph, reads: str, gives: str
) -> Iterator[tuple[str, TensorType]]:
    """Names and types of the inputs of a task that runs once a step: all of one role, as are its outputs."""
    names = [
        sorted(port.name for port in ports if port.role == role)
        for ports, role in ((graph.input_ports, reads), (graph.output_ports, gives))
    ]
    if (
        names[0] != names[1]
        or len(names[0]) != len(graph.inputs)
        or len(names[1]) != len(graph.outputs)
    ):
        raise VerifyError(
            f"{where}, {graph.name}: must read {reads} ports and give {gives} ports of the same names, got "
            f"{[str(p) for p in graph.input_ports]} and {[str(p) for p in graph.output_ports]}"
        )
    return ((p.name, v.type) for p, v in zip(graph.input_ports, graph.inputs, strict=True))


_FROM_RUNTIME = ("param", "buffer", "batch", "rng_key", "loss_grad")


def _verify_edge(program: Program, edge: Edge) -> None:
    source, target = program.stages[edge.source], program.stages[edge.target]
    made = _port_types(source, edge.kind, outputs=True).get(edge.output)
    read = _port_types(target, edge.kind, outputs=False).get(edge.input)
    if made is None:
        raise VerifyError(f"edge {edge}: the source stage has no output {edge.output}")
    if read is None:
        raise VerifyError(f"edge {edge}: the target stage has no input {edge.input}")
    if made != read:
        raise VerifyError(f"edge {edge}: sends {made}, the target reads {read}")
    if edge.source == edge.target or (edge.kind == "activation") != (edge.source < edge.target):
        raise VerifyError(f"edge {edge}: activations go to later stages, gradients to earlier ones")


def _port_types(stage: Stage, role: str, *, outputs: bool) -> dict[Port, object]:
    found: dict[Port, object] = {}
    for graph in stage.tasks.values():
        ports, values = (
            (graph.output_ports, graph.outputs) if outputs else (graph.input_ports, graph.inputs)
        )
        found.update((p, v.type) for p, v in zip(ports, values, strict=True) if p.role == role)
    return found


def _verify_flow(program: Program, stage: Stage, received: set[tuple[int, Port]]) -> None:
    """Each port a task reads comes from the runtime, an edge, or an earlier task of the stage."""
    orders = (("F", "B"), ("F", "I", "W"))
    for order in orders:
        written: set[Port] = set()
        for kind in order:
            graph = stage.tasks.get(kind)  # type: ignore[call-overload]
            if graph is None:
                continue
            for port in graph.input_ports:
                known = port.role in _FROM_RUNTIME or port in written
                if not known and (stage.index, port) not in received:
                    raise VerifyError(
                        f"program {program.name}, stage {stage.index}, task {kind}: nothing writes its input {port}"
                    )
            written.update(graph.output_ports)
            written.update(graph.input_ports)
