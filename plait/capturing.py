"""Capturing a model, by the frontend of its framework and on a mesh: what `compile` does before any backend."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from plait.core_ir.errors import BatchError, CaptureError, UnsupportedError, UsageError
from plait.core_ir.hardware import Hardware
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import CPU_CORE
from plait.core_ir.passes.defer_reductions import defer_reductions
from plait.core_ir.passes.pipeline import DEFAULT_PASSES, Passes, build_program
from plait.core_ir.program import Program
from plait.extras import Framework, load
from plait.frontends.captured import Captured
from plait.options import framework_of


def capture_program(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    passes: Passes = DEFAULT_PASSES,
    hardware: Hardware = CPU_CORE,
    **options: Any,
) -> tuple[Captured, Program]:
    """The model as the frontend captured it and as the passes cut it; options are those of `capture_model`."""
    captured, mesh = capture_model(loss_fn, model, batch, **options)
    return captured, program_of(captured, passes, hardware, mesh)


def capture_model(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    num_microbatches: int,
    split: Sequence[str] | int | None = None,
    has_aux: bool = False,
    state: Any = None,
    trainable: Callable[[Any, Any], bool] | None = None,
    device: Any = None,
    mesh: Mesh | None = None,
    guess: bool = True,
) -> tuple[Captured, Mesh | None]:
    """The model as its frontend captured it, and the mesh with the axes that it names.

    Arguments are those of `compile`; the model may be abstract: on `meta` (torch), of ShapeDtypeStructs (JAX).

    guess: whether the data axes of the mesh are but a guess, as those of `read_mesh` are: they are those that the model
        does not name, which only its capture tells. It is captured again where the guess was wrong.
    """
    framework = framework_of(model)
    capture = partial(
        load(framework, f"frontends.{framework}.capture").capture,
        loss_fn,
        model,
        batch,
        split=split,
        has_aux=has_aux,
        state=state,
        trainable=trainable,
        device=device,
    )
    if guess and mesh is not None:
        mesh = _without_axes_of(model, framework, mesh)
    return _capture_on(mesh, capture, num_microbatches, guess=guess)


def program_of(
    captured: Captured, passes: Passes, hardware: Hardware, mesh: Mesh | None = None
) -> Program:
    """What was captured as the passes cut it, for ranks of this hardware; `mesh` is that which came with it."""
    return build_program(
        captured.graph,
        captured.num_cuts + 1,
        passes=passes,
        mesh=mesh,
        layouts=captured.layouts,
        hardware=hardware,
    )


def check_annotated(captured: Captured, backend: str) -> None:
    """UnsupportedError where the backend cannot do what annotations of the model ask for."""
    for axis, where in captured.annotated.items():
        if backend != "jax":
            raise UnsupportedError(
                f"{where} leaves axis {axis!r} to XLA's partitioning, which the {backend} backend does not have; use "
                'backend="jax", or write what ranks do by shard_map'
            )


def _without_axes_of(model: Any, framework: Framework, mesh: Mesh) -> Mesh:
    """The mesh with a better guess at its data axes: not those over which parameters of the model lie."""
    if framework != "torch":
        return mesh
    cut: frozenset[str] = load("torch", "frontends.torch.dtensors").axes_of_model(model, mesh)
    return replace(mesh, data_axes=tuple(axis for axis in mesh.data_axes if axis not in cut))


def _capture_on(
    mesh: Mesh | None, capture: Callable[..., Captured], num_microbatches: int, *, guess: bool
) -> tuple[Captured, Mesh | None]:
    if mesh is None:
        return capture(num_microbatches=num_microbatches), None

    def run(mesh: Mesh) -> Captured:
        try:
            return capture(num_microbatches=num_microbatches * mesh.num_parts, mesh=mesh)
        except BatchError as refused:
            if mesh.num_parts == 1:
                raise
            raise BatchError(
                f"{refused} (these are {num_microbatches} microbatches, each cut into {mesh.num_parts} parts over "
                f"{', '.join(mesh.data_axes)})"
            ) from refused

    try:
        captured = run(mesh)
    except (BatchError, CaptureError):  # parts too small to cut, by us or by the model
        if not guess or not mesh.data_axes:
            raise
        captured = run(replace(mesh, data_axes=()))
        if not captured.named_axes and not captured.annotated:
            raise
        mesh = replace(mesh, data_axes=())
    named, annotated = captured.named_axes, captured.annotated
    twice = [axis for axis in mesh.data_axes if axis in named]
    if captured.framework == "jax" and twice and not guess:
        raise UsageError(
            f"data_axes names {', '.join(map(repr, twice))}, over which the model's own shard_map runs: its specs say "
            "how the batch lies; take it out of data_axes"
        )
    both = [axis for axis in mesh.data_axes if axis in annotated]
    if both and not guess:
        raise UsageError(
            f"data_axes names {', '.join(map(repr, both))}, which {annotated[both[0]]} leaves to XLA's partitioning: "
            "the batch is whole along it; take it out of data_axes"
        )
    if guess:
        own = {*(named - captured.batch_axes), *annotated}
        found = tuple(axis for axis in mesh.other_axes if axis not in own)
        if found != mesh.data_axes:
            mesh = replace(mesh, data_axes=found)
            captured = run(mesh)
    graph, partial_grads = defer_reductions(captured.graph)
    mesh = replace(
        mesh,
        named_axes=tuple(axis for axis in mesh.other_axes if axis in named),
        partial_grads=partial_grads,
        auto_axes=tuple(axis for axis in mesh.other_axes if axis in annotated),
        placements=captured.placements,
    )
    return replace(captured, graph=graph), mesh
