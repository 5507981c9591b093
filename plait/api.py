"""`plait.compile` and the other public functions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.backends.runtime import Engine
from plait.capturing import capture_model, check_annotated, program_of
from plait.core_ir.arrays import is_torch
from plait.core_ir.errors import ScheduleError, UsageError
from plait.core_ir.hardware import Hardware
from plait.core_ir.mesh import Mesh
from plait.core_ir.named_hardware import CPU_CORE, hardware_of_device
from plait.core_ir.passes.pipeline import DEFAULT_PASSES, Passes, schedule_program
from plait.core_ir.program import Program
from plait.core_ir.schedule import registry
from plait.core_ir.schedule.estimate import estimate
from plait.core_ir.schedule.placement import loop
from plait.core_ir.schedule.schedule import Schedule
from plait.extras import Framework, installed, load
from plait.options import check_options, framework_of
from plait.pipeline import Pipeline, check_fits


def compile(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    num_microbatches: int,
    split: Sequence[str] | int | None = None,
    schedule: str | Schedule | os.PathLike[str] = "1f1b",
    num_ranks: int | None = None,
    backend: str | None = None,
    engine: str | None = None,
    device: Any = None,
    mesh: Any = None,
    stage_axis: str = "stage",
    data_axes: Sequence[str] | None = None,
    reduction: str = "mean",
    remat: str = "none",
    codegen: str | None = None,
    seed: int = 0,
    state: Any = None,
    has_aux: bool = False,
    trainable: Callable[[Any, Any], bool] | None = None,
    passes: Passes | None = None,
    hardware: str | os.PathLike[str] | Hardware | None = None,
) -> Pipeline:
    """Compile a model and its loss for a pipeline.

    loss_fn: `loss_fn(model, batch) -> scalar`, for both frameworks; `(scalar, aux)` with `has_aux`, aux a pytree whose
        arrays come back stacked by microbatch, [M, ...]. A JAX loss may take a keyword `rng` and gets the microbatch's
        key; with `state` it is `loss_fn(model, batch, state) -> (scalar, new_state)` (with both, `(scalar, new_state,
        aux)`).
    model: a torch.nn.Module, or a pytree of JAX or NumPy arrays (nnx module or state, linen variables, equinox module).
    batch: an example (values do not count; abstract arrays will do). Arrays of rank >= 1 are cut along dim 0 into
        `num_microbatches`; 0-dim arrays and Python numbers go whole to every microbatch; str, bool, None are static.
    split: None (cuts where `plait.stage_boundary` is called; without any, one stage) or module paths, a cut before
        each.
    schedule: a name, a `plait.Schedule`, or a path to a CSV file.
    num_ranks: default, as many as the schedule needs for the number of stages.
    backend: "torch" or "jax", default that of the model. engine: torch "local" (default) or "distributed" (default when
        WORLD_SIZE > 1); jax "mpmd" (default) or "spmd". codegen: torch "inductor" (default) or "eager".
    mesh: axes with their sizes: a dict, {"stage": 2, "data": 2}, a torch DeviceMesh or a JAX Mesh. Ranks stand in it in
        row-major order. Along `stage_axis` stand the stages. An axis that the model's collectives or the layouts of
        its parameters name is the model's own: the batch is whole along it, and what ranks compute is what the model
        says. An axis that a JAX model's sharding annotations (`with_sharding_constraint`, nnx metadata) or the
        NamedShardings of its parameters name is left to XLA: the batch is whole along it, and XLA partitions over it
        what it likes. Every other axis is data parallel: each microbatch is cut once more, and losses and gradients are
        those of all parts.
    data_axes: the axes along which microbatches are cut, where they are not the ones that the model does not name. For
        a torch model whose experts lie along an axis over which its tokens lie too: gradients of parameters that the
        axis cuts are as captured, those of others are added up along it.
    device: torch: default cuda:LOCAL_RANK when there is one, else cpu.
    reduction: "mean": the mean over microbatches of the loss; "sum": the sum.
    seed: of the random ops. trainable: `trainable(path, leaf) -> bool`, JAX models; path is "layers.0.kernel".

    passes: what the program goes through, a `plait.passes.Passes`; default all of Plait's. With `Passes(sharding=...)`
        ranks along a data axis hold parts of the parameters each.
    hardware: what the cost model takes the ranks for, by whose times communication is ordered beside compute,
        `schedule="auto"` is searched for, and `Pipeline.simulate` goes: a name ("cpu-core", "a100", "h100", "h200",
        "h800"), a .json or .toml file, or a `plait.Hardware`. Default: what the device is, by the name of a GPU, else
        "cpu-core"; a GPU without an entry is taken for an "h100", which is logged. Results do not depend on it.

    Raises a PlaitError at once, on every rank of a distributed run, for anything that does not fit.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        framework = framework_of(model)
        options = check_options(
            framework,
            backend=backend,
            engine=engine,
            codegen=codegen,
            reduction=reduction,
            split=split,
            remat=remat,
            mesh=mesh,
            stage_axis=stage_axis,
            data_axes=data_axes,
            passes=passes,
            hardware=hardware,
            device=device,
            seed=seed,
            has_aux=has_aux,
            num_microbatches=num_microbatches,
            num_ranks=num_ranks,
            world_size=world_size,
        )
    except UsageError as refused:
        if world_size > 1 and backend != "jax" and engine != "local" and installed("torch"):
            load("torch", "backends.torch.engines").tell_other_ranks(refused)
        raise
    engines = load(options.backend, f"backends.{options.backend}.engines")
    engines.join(options.engine)
    where: Any = None
    mesh = options.mesh
    if mesh is not None:
        num_ranks = mesh.axes[stage_axis]
        if passes is not None and passes.sharding is not None:
            mesh = replace(mesh, shard_axis=passes.sharding.axis)
    error: Exception | None = None
    try:
        where = engines.resolve_device(device)
        taken = options.hardware or hardware_of_device(engines.device_name(where))
        captured, mesh = capture_model(
            loss_fn,
            model,
            batch,
            num_microbatches=num_microbatches,
            split=split,
            has_aux=has_aux,
            state=state,
            trainable=trainable,
            device=where if framework == options.backend == "torch" else None,
            mesh=mesh,
            guess=data_axes is None,
        )
        check_annotated(captured, options.backend)
        passes = passes or DEFAULT_PASSES
        program = program_of(captured, passes, taken, mesh)
        chosen = schedule_for(
            program, schedule, num_ranks, num_microbatches, hardware=taken, mesh=mesh
        )
        program = schedule_program(program, chosen.pairs, passes, hardware=taken, mesh=mesh)
        built: Engine = engines.build(
            program,
            chosen,
            engine=options.engine,
            device=where,
            codegen=options.codegen,
            mesh=mesh,
            layouts=captured.layouts,
        )
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    text = "" if error else f"hardware={taken.name!r}\n{chosen}\n{program}"
    engines.agree(options.engine, where, error, text)
    store = None
    if framework == options.backend == "torch":
        trainable_leaves = {leaf.name: leaf.trainable for leaf in captured.leaves}
        store = load("torch", "backends.torch.store").Store(model, trainable_leaves, program, built)
    return Pipeline(
        program,
        chosen,
        taken,
        replace(options, mesh=mesh),
        captured,
        built,
        store,
        is_searched=schedule == "auto",
    )


def schedule_for(
    program: Program,
    schedule: str | Schedule | os.PathLike[str],
    num_ranks: int | None,
    num_microbatches: int,
    *,
    hardware: Hardware = CPU_CORE,
    mesh: Mesh | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """The schedule by name, by file or as given, validated against the program; ScheduleError where it does not fit.

    One that is searched for is searched for the program's times on the hardware, whose ranks stand in the mesh.
    memory_limit: the bytes that a rank may hold, as `estimate` counts them.
    """
    stages = program.num_stages
    if isinstance(schedule, Schedule):
        chosen = schedule
    elif isinstance(schedule, os.PathLike) or str(schedule).endswith(".csv"):
        chosen = Schedule.from_csv(Path(schedule))
    elif isinstance(schedule, str):
        ranks, per_rank = registry.shape_for(schedule, stages, num_ranks)
        times, memory = estimate(program, loop(ranks, per_rank), hardware, mesh)
        chosen = registry.build(
            schedule,
            ranks,
            num_microbatches,
            stages_per_rank=per_rank,
            times=times,
            memory=memory if memory_limit is not None else None,
            memory_limit=memory_limit,
        )
    else:
        raise UsageError(
            f"schedule must be a name, a plait.Schedule or a path to a CSV file, got {schedule!r}"
        )
    found = (chosen.num_stages, chosen.num_microbatches)
    if found != (stages, num_microbatches):
        raise ScheduleError(
            f"schedule {chosen.name!r} is for {found[0]} stages and {found[1]} microbatches; the program has {stages} "
            f"stages and num_microbatches is {num_microbatches}"
        )
    if num_ranks is not None and num_ranks != chosen.num_ranks:
        raise ScheduleError(
            f"schedule {chosen.name!r} is for {chosen.num_ranks} ranks, but num_ranks is {num_ranks}"
        )
    check_fits(chosen, program)
    return chosen


def stage_boundary(tree: Any) -> Any:
    """Mark a cut between stages here: everything that was computed before crosses as `tree`, a pytree of arrays.

    Returns the tree. Outside a capture it is the identity, under grad, jit, vmap and remat too.
    """
    framework: Framework = "torch" if _holds_torch(tree) or not installed("jax") else "jax"
    return load(framework, f"frontends.{framework}.boundary").stage_boundary(tree)


def _holds_torch(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_holds_torch, tree.values()))
    if isinstance(tree, (list, tuple)):
        return any(map(_holds_torch, tree))
    return is_torch(tree)
