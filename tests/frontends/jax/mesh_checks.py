"""Helpers: a loss that is mapped over a mesh, captured, and run on every rank by the interpreter, against JAX itself.

from mesh_checks import check, jax_mesh
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax_checks import carrier

from plait.core_ir.graph import Graph
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh, part_of
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.core_ir.passes.pipeline import build_program
from plait.core_ir.program import Program
from plait.core_ir.verify import verify
from plait.frontends.captured import Captured
from plait.frontends.jax.capture import capture
from plait.frontends.jax.reference import named_gradients

Arrays = list[dict[tuple[str, str], Any]]
"""For each rank, arrays by role and name of their port."""


def jax_mesh(**axes: int) -> Any:
    """A mesh of as many host devices."""
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: int(np.prod(list(axes.values())))],
    )


def capture_on(
    loss_fn: Callable[..., Any], model: Any, batch: Any, axes: Mapping[str, int], **options: Any
) -> Captured:
    """The loss captured for one microbatch, for a mesh with these axes beside that of the stages."""
    mesh = Mesh({"stage": 2, **axes})
    return capture(
        loss_fn,
        model,
        batch,
        **{"num_microbatches": 1, "split": None, "mesh": mesh, **options},
    )


def check(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    axes: Mapping[str, int],
    *,
    dtype: str = "f32",
    loss_and_grads: tuple[Any, Any] | None = None,
    **options: Any,
) -> Captured:
    """The captured step, whole and task by task, gives on every rank what `jax.value_and_grad` of the loss gives.

    loss_and_grads: what it gives, where it is not of `loss_fn(model, batch)` alone.
    """
    captured = capture_on(loss_fn, model, batch, axes, **options)
    assert "extern" not in {eqn.op.name for eqn in captured.graph.eqns}
    if loss_and_grads is None:
        loss_and_grads = jax.jit(jax.value_and_grad(loss_fn, allow_int=True))(model, batch)
    loss, grads = loss_and_grads
    inputs = rank_inputs(captured, batch, axes)
    joint = run(verify(captured.graph), inputs, axes)
    assert_step(captured, joint, loss, grads, axes, dtype)
    program = build_program(captured.graph, captured.num_cuts + 1)
    for backward in (("B",), ("I", "W")):
        assert_step(captured, run_tasks(program, inputs, axes, backward), loss, grads, axes, dtype)
    return captured


def rank_inputs(captured: Captured, batch: Any, axes: Mapping[str, int]) -> Arrays:
    """What each rank reads: its parts of what is cut, the whole of the rest; the first microbatch."""
    held = captured.read_leaves()
    first = captured.batch.microbatches(captured.flatten_batch(batch))[0]
    (cotangent,) = captured.graph.inputs_of("loss_grad")
    ranks = []
    for place in Mesh(axes).places():
        arrays: dict[tuple[str, str], Any] = {
            (leaf.role, leaf.name): part_of(carrier(held[leaf.name]), leaf.layout, axes, place)
            for leaf in captured.leaves
        }
        arrays |= {("batch", name): np.asarray(x) for name, x in first.items()}
        arrays["rng_key", ""] = np.array([0, 7], np.uint32)
        arrays["loss_grad", ""] = np.ones((), cotangent[1].type.dtype.numpy)
        ranks.append(arrays)
    return ranks


def run(graph: Graph, inputs: Arrays, axes: Mapping[str, int]) -> Arrays:
    """The outputs of a graph on each rank."""
    ports = [(p.role, p.name) for p in graph.input_ports]
    results = interpret_ranks(graph, [[arrays[p] for p in ports] for arrays in inputs], axes)
    names = [(p.role, p.name) for p in graph.output_ports]
    return [dict(zip(names, arrays, strict=True)) for arrays in results]


def run_tasks(
    program: Program, inputs: Arrays, axes: Mapping[str, int], backward: Sequence[str]
) -> Arrays:
    """The outputs of a step on each rank, task by task; parts of a gradient added in the order of stages."""
    stages = [[dict(arrays) for arrays in inputs] for _ in program.stages]
    outputs: Arrays = [{} for _ in inputs]

    def run_task(stage: int, kind: str) -> None:
        graph = program.stages[stage].tasks[kind]  # type: ignore[index]
        for rank, made in enumerate(run(graph, stages[stage], axes)):
            stages[stage][rank].update(made)
            for port, array in made.items():
                if port[0] in ("loss", "aux", "buffer_update"):
                    outputs[rank][port] = array
                elif port[0] == "param_grad":
                    known = outputs[rank].get(port)
                    outputs[rank][port] = array if known is None else known + array
            for edge in program.edges:
                source = edge.output.role, edge.output.name
                if edge.source == stage and source in made:
                    target = edge.input.role, edge.input.name
                    stages[edge.target][rank][target] = made[source]

    for stage in range(program.num_stages):
        run_task(stage, "F")
    for stage in reversed(range(program.num_stages)):
        for kind in backward:
            run_task(stage, kind)
    return outputs


def assert_step(
    captured: Captured,
    ranks: Arrays,
    loss: Any,
    grads: Any,
    axes: Mapping[str, int],
    dtype: str = "f32",
) -> None:
    """Every rank has the loss, and its parts of the gradients."""
    allowed, expected = tolerance(dtype, "framework"), named_gradients(grads)
    learned = [leaf for leaf in captured.leaves if leaf.trainable]
    for place, out in zip(Mesh(axes).places(), ranks, strict=True):
        assert relative_error(out["loss", ""], np.asarray(loss)) <= allowed.loss
        found = {}
        for leaf in learned:
            whole = np.array(expected[leaf.name])
            part_of(whole, leaf.layout, axes, place)[...] = out.get(
                ("param_grad", leaf.name), np.zeros(leaf.type.shape)
            )
            found[leaf.name] = whole
        assert gradient_error(found, expected) <= allowed.grads


def collectives(captured: Captured) -> list[tuple[str, str]]:
    """Each collective outside loops, and its axis."""
    return [
        (eqn.op.name, eqn.attrs["axis"])
        for eqn in captured.graph.eqns
        if eqn.op.evaluate_ranks is not None and eqn.op.effect
    ]
