"""Split the backward of every stage into an input-gradient task I and a weight-gradient task W.

    B: %h = dot_general(%g, %w)    -> gradient        I: %h = dot_general(%g, %w)    -> gradient
       %d = dot_general(%x, %g)    -> param_grad  ->
                                                      W: %d = dot_general(%x, %g)    -> param_grad

I is what the gradients that leave the stage need; in a stage that none leaves, what two or more parameter gradients
need. Effects that no output needs, and externs with several results, stand in I, with all they need; so do products of
forward values that a checkpointed region computes again, of which W gets the results. A collective stands where its
result is needed, in I when both need it; its start and its wait are never parted, and W never runs it again. Cheap
equations join I where that leaves less to hold (`join_input_part`). W is the rest. A parameter gradient that I computes
is an output of I. A scan that makes both kinds of gradients is split in two (`split_scans`).

What W reads of I is handed over, unless W can compute it again by a view or by one cheap equation (at most one flop an
element) from fewer bytes: of ports that W keeps alive anyway, parameters and batch leaves count nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from plait.core_ir.cost import eqn_flops
from plait.core_ir.graph import Eqn, Graph, Port, Value
from plait.core_ir.ops.control import extern
from plait.core_ir.passes.assemble_tasks import build_graph
from plait.core_ir.passes.equations import has_effect, nested_graphs, pinned_equations
from plait.core_ir.passes.join_input_part import join_input_part
from plait.core_ir.passes.recompute import is_view, price
from plait.core_ir.passes.recomputed_products import dependents, recomputed_products
from plait.core_ir.passes.split_scans import split_scans
from plait.core_ir.program import Program, Stage

_GRADIENT_ROLES = ("gradient", "loss_grad")
_FREE_ROLES = ("param", "buffer", "batch", "rng_key", "loss_grad")


def split_backward(program: Program) -> Program:
    """The program with tasks I and W beside B in every stage. A task without work is a graph without equations.

    Control flow that makes both kinds of gradients and cannot be split stands in I, which a note says.
    """
    stages = tuple(map(_split_stage, program.stages))
    notes = tuple(note for stage in stages for note in _whole_control_flow(stage))
    return replace(program, stages=stages, notes=program.notes + notes)


def _split_stage(stage: Stage) -> Stage:
    input_part, weight_part = split_task(stage.tasks["B"])
    return Stage(stage.index, {**stage.tasks, "I": input_part, "W": weight_part})


def _whole_control_flow(stage: Stage) -> Iterator[str]:
    given = {v for _, v in stage.tasks["I"].outputs_of("param_grad")}
    for eqn in stage.tasks["I"].eqns:
        if any(True for _ in nested_graphs(eqn)) and any(r in given for r in eqn.results):
            yield (
                f"stage {stage.index}: {eqn.op.name} ({eqn.source}) makes input and weight gradients together and was"
                " not split: both are computed in I"
            )


def split_task(graph: Graph) -> tuple[Graph, Graph]:
    """I and W of one backward."""
    ports = dict(zip(graph.inputs, graph.input_ports, strict=True))
    sent = [v for _, v in graph.outputs_of("gradient")]
    graph, weight_scans = split_scans(graph, sent, _gradients(graph))
    outputs = tuple(zip(graph.output_ports, graph.outputs, strict=True))
    in_input_part = _with_joined(graph, _input_part(graph, weight_scans))
    made = {r for eqn in graph.eqns if eqn in in_input_part for r in eqn.results}
    rest = [eqn for eqn in graph.eqns if eqn not in in_input_part]
    given = [(p, v) for p, v in outputs if p.role == "gradient" or v in made]
    left = [(p, v) for p, v in outputs if p.role != "gradient" and v not in made]

    wanted = [*(o for eqn in rest for o in eqn.operands), *(v for _, v in left)]
    handed, again = _hand_over(graph, in_input_part, wanted)
    handover = {v: Port("handover", str(i)) for i, v in enumerate(handed)}
    prefix = graph.name.removesuffix(".backward")
    input_part = build_graph(
        f"{prefix}.backward_input",
        ports,
        [eqn for eqn in graph.eqns if eqn in in_input_part],
        [*given, *((p, v) for v, p in handover.items())],
    )
    weight_part = build_graph(
        f"{prefix}.backward_weight",
        {**ports, **handover},
        [eqn for eqn in graph.eqns if eqn in again or eqn not in in_input_part],
        left,
    )
    return input_part, weight_part


def _gradients(graph: Graph) -> set[Value]:
    """The values that depend on gradients; the others are made of forward values alone."""
    ports = zip(graph.inputs, graph.input_ports, strict=True)
    return dependents(graph.eqns, (v for v, port in ports if port.role in _GRADIENT_ROLES))


def _input_part(graph: Graph, weight_scans: set[Eqn]) -> set[Eqn]:
    """The equations of I."""
    wanted = {v for _, v in graph.outputs_of("gradient")}
    required = set() if wanted else _shared_by_gradients(graph) - weight_scans
    required |= recomputed_products(graph.eqns, _gradients(graph))
    required |= pinned_equations(graph.eqns, graph.outputs)
    required |= {eqn for eqn in graph.eqns if _is_joint_extern(eqn)}
    part: set[Eqn] = set()
    for eqn in reversed(graph.eqns):
        if any(r in wanted for r in eqn.results) or eqn in required:
            part.add(eqn)
            wanted.update(eqn.operands)
    return part


def _with_joined(graph: Graph, part: set[Eqn]) -> set[Eqn]:
    """I with the cheap equations that join it."""
    ports = dict(zip(graph.inputs, graph.input_ports, strict=True))
    producers = {r: eqn for eqn in graph.eqns if eqn in part for r in eqn.results}
    rest = [eqn for eqn in graph.eqns if eqn not in part]
    outputs = [v for v in graph.outputs if v not in producers]
    return part | join_input_part(
        rest, outputs, producers, lambda v: v in ports and ports[v].role in _FREE_ROLES
    )


def _is_joint_extern(eqn: Eqn) -> bool:
    return eqn.op is extern and len(eqn.results) > 1


def _shared_by_gradients(graph: Graph) -> set[Eqn]:
    """The equations whose results two or more parameter gradients need."""
    several = -1
    leads_to: dict[Value, int] = {}  # the gradient's number, or `several`
    for number, value in enumerate(graph.outputs):
        leads_to[value] = several if value in leads_to else number
    shared: set[Eqn] = set()
    for eqn in reversed(graph.eqns):
        numbers = {leads_to[r] for r in eqn.results if r in leads_to}
        number = numbers.pop() if len(numbers) == 1 else several
        if number == several:
            shared.add(eqn)
        for operand in eqn.operands:
            leads_to[operand] = number if leads_to.get(operand, number) == number else several
    return shared


def _hand_over(
    graph: Graph, in_input_part: set[Eqn], wanted: Iterable[Value]
) -> tuple[list[Value], set[Eqn]]:
    """What I hands to W, in the order of definition, and the equations of I that W computes again."""
    reads = set(wanted)
    reads.update(
        v
        for v, port in zip(graph.inputs, graph.input_ports, strict=True)
        if port.role in _FREE_ROLES
    )
    producers = {r: eqn for eqn in graph.eqns if eqn in in_input_part for r in eqn.results}
    handed: list[Value] = []
    again: set[Eqn] = set()
    for eqn in reversed(graph.eqns):
        results = [r for r in eqn.results if r in reads]
        if eqn not in in_input_part or not results:
            continue
        kept_bytes = sum(r.type.num_bytes for r in results)
        cost = sum(price(o, producers, reads.__contains__) for o in eqn.operands)
        if cost <= kept_bytes if is_view(eqn) else _is_cheap(eqn) and cost < kept_bytes:
            again.add(eqn)
            reads.update(eqn.operands)
        else:
            handed.extend(reversed(results))
    return handed[::-1], again


def _is_cheap(eqn: Eqn) -> bool:
    return eqn_flops(eqn) <= sum(r.type.size for r in eqn.results) and not (
        has_effect(eqn) or _is_joint_extern(eqn)
    )
