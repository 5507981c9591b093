"""The command line: `plait`, and `python -m plait`."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias

import typer

from plait.api import schedule_for
from plait.capturing import capture_program
from plait.cli_compare import run_and_show, simulate_and_show
from plait.cli_lists import axes, changes, counts, entries, names
from plait.cli_schedule import app as schedule_app
from plait.compare.events import MISUSES
from plait.compare.fitting import check_stages
from plait.compare.plan import Request, mesh_of, plan_jobs
from plait.compare.simulate import with_experts
from plait.core_ir.cost import seconds_on
from plait.core_ir.errors import PlaitError, UsageError
from plait.core_ir.lanes import describe as describe_lanes
from plait.core_ir.lanes import lanes
from plait.core_ir.named_hardware import NAMED, find_hardware
from plait.core_ir.passes.pipeline import schedule_program
from plait.core_ir.program import PAIR, TASK_KINDS
from plait.core_ir.text import print_graph, print_program
from plait.workloads.abstract import load_abstract
from plait.workloads.workload import Sizes, is_named

app = typer.Typer(
    help="Compile PyTorch and JAX models for pipeline-parallel training, and compare how they run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(schedule_app, name="schedule")

SIMULATED_SCHEDULES = "1f1b,interleaved-1f1b,zbv,dualpipev"

Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="mlp, llama, deepseek_v3, or package.module:build with build() -> (loss_fn, model, batch).",
    ),
]
Config: TypeAlias = Annotated[
    str,
    typer.Option(help="Size of a named model: tiny, small; 7b; of deepseek_v3, 16b and 671b."),
]
Frontend: TypeAlias = Annotated[
    str, typer.Option(help="Sources of a named model: torch,flax. Default: those installed.")
]
Backend: TypeAlias = Annotated[str, typer.Option(help="torch,jax. Default: those installed.")]
Engine: TypeAlias = Annotated[
    str,
    typer.Option(
        help="local, distributed (torch); mpmd, spmd (jax). Each goes with its backend. "
        "Default: distributed, mpmd."
    ),
]
Ranks: TypeAlias = Annotated[int, typer.Option(min=1, help="Ranks of the pipeline.")]
MeshAxes: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="AXIS=SIZE,...",
        help="Axes of the mesh beside that of the stages, as data=2,expert=4; the last stays closest together.",
    ),
]
Changes: TypeAlias = Annotated[
    str,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE,...",
        help="Other values for fields of a named model's config, as num_layers=8,seq_len=1024.",
    ),
]
Microbatches: TypeAlias = Annotated[int, typer.Option(min=1, help="Microbatches of a batch.")]
Split: TypeAlias = Annotated[
    str, typer.Option(help="Module paths to cut before. Default: stages of even length.")
]
Dtype: TypeAlias = Annotated[str, typer.Option(help="Of a named model's parameters: f32 or bf16.")]
BatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows of a named model's batch. Default: 2 a microbatch, times the ranks along the axes of --mesh.",
    ),
]
Codegen: TypeAlias = Annotated[
    str | None, typer.Option(help="Of the torch backend: inductor (default) or eager.")
]
Device: TypeAlias = Annotated[
    str | None,
    typer.Option(help="cpu, cuda (torch), gpu (jax). Default: the GPU where there is one."),
]
Json: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.")
]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option(
        min=1,
        max=1e6,
        help="Seconds without a word from an engine after which it is given up.",
    ),
]


@app.command()
def compare(
    model: Model,
    config: Config = "tiny",
    frontend: Frontend = "",
    backend: Backend = "",
    engine: Engine = "",
    schedule: Annotated[
        str,
        typer.Option(
            help=f"Names or CSV files. Default: 1f1b; with --simulate {SIMULATED_SCHEDULES}."
        ),
    ] = "",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of the pipeline. Default: 2; with --simulate 8."),
    ] = None,
    mesh: MeshAxes = "",
    microbatches: Annotated[
        str,
        typer.Option(
            help="Microbatches of a batch; several to sweep over their size. Default: 8; with --simulate 16."
        ),
    ] = "",
    split: Split = "",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of a named model's parameters: f32 or bf16. Default: f32; with --simulate bf16."
        ),
    ] = None,
    config_changes: Changes = "",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a row.")] = 10,
    batch_size: BatchSize = None,
    train: Annotated[
        int,
        typer.Option(min=0, help="Then train so many steps on the first engine of each backend."),
    ] = 0,
    codegen: Codegen = None,
    device: Device = None,
    json: Json = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Draw each row's measured step beside the simulated one, on one scale.",
        ),
    ] = None,
    timeout: Timeout = 600.0,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run nothing: capture the model without weights and simulate it on --hardware.",
        ),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"For --simulate: {', '.join(NAMED)}, or a .json or .toml file. Default: h100.",
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="AXIS", help="For --simulate: shard parameters over this axis.")
    ] = "",
) -> None:
    """Run a model through frontends, backends, engines and schedules, and compare them in one table.

    With --simulate nothing runs: the schedules are simulated on hardware that need not be there. On a mesh, a second
    table says what splitting, sharding, multiplexing and overlapping are worth. A model with experts has them over the
    ranks of a node then, equally loaded, and everything else sharded over these, unless --mesh says otherwise.

    Options that say so take lists by comma: --frontend torch,flax. Every engine runs in processes of its own, which
    this command starts, one thread a rank. Exit code 1 where a row does not agree with the unpipelined framework.
    """
    request = Request(
        model=model,
        config=config,
        frontends=names(frontend),
        backends=names(backend),
        engines=names(engine),
        schedules=names(schedule or (SIMULATED_SCHEDULES if simulate else "1f1b")),
        num_ranks=ranks or (8 if simulate else 2),
        axes=axes(mesh),
        changes=changes(config_changes),
        microbatches=counts(microbatches or ("16" if simulate else "8")),
        split=entries(split),
        dtype=dtype or ("bf16" if simulate else "f32"),
        batch_size=batch_size,
        steps=steps,
        train_steps=train,
        codegen=codegen,
        device=device,
        timeline=timeline is not None,
    )
    if simulate:
        chosen = find_hardware(hardware or "h100")
        simulate_and_show(
            with_experts(replace(request, shard=shard or None), chosen), chosen, json, timeline
        )
        return
    if hardware is not None or shard:
        raise UsageError(
            f"--{'shard' if shard else 'hardware'} describes what --simulate simulates; add --simulate"
        )
    run_and_show(request, json, timeout, timeline)


@app.command()
def train(
    model: Model,
    config: Config = "tiny",
    frontend: Frontend = "",
    backend: Backend = "",
    engine: Engine = "",
    schedule: Annotated[str, typer.Option(help="A name or a CSV file.")] = "1f1b",
    ranks: Ranks = 2,
    mesh: MeshAxes = "",
    microbatches: Microbatches = 8,
    split: Split = "",
    dtype: Dtype = "f32",
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    batch_size: BatchSize = None,
    codegen: Codegen = None,
    device: Device = None,
    json: Json = None,
    timeout: Timeout = 600.0,
) -> None:
    """Train a model through backends, one engine of each, from the same weights on the same batches.

    AdamW; the loss on held-out batches before and after. A model of your own is trained on the batch it comes with.
    """
    request = Request(
        model=model,
        config=config,
        frontends=names(frontend),
        backends=names(backend),
        engines=names(engine),
        schedules=names(schedule),
        num_ranks=ranks,
        axes=axes(mesh),
        microbatches=(microbatches,),
        split=entries(split),
        dtype=dtype,
        batch_size=batch_size,
        steps=0,
        train_steps=steps,
        codegen=codegen,
        device=device,
    )
    run_and_show(request, json, timeout)


@app.command()
def program(
    model: Model,
    config: Config = "tiny",
    frontend: Annotated[
        str,
        typer.Option(help="Source of a named model: torch or flax. Default: what is installed."),
    ] = "",
    split: Split = "",
    ranks: Annotated[
        int, typer.Option("--ranks", "--stages", min=1, help="Stages to cut into.")
    ] = 2,
    mesh: MeshAxes = "",
    microbatches: Microbatches = 8,
    batch_size: BatchSize = None,
    dtype: Dtype = "f32",
    config_changes: Changes = "",
    stage: Annotated[int | None, typer.Option(min=0, help="One stage. Default: all.")] = None,
    task: Annotated[
        str | None, typer.Option(help="One task: F, B, I, W or F&B. Default: all.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Whose F&B pairs to join. Default: dualpipev with --task F&B, else none."
        ),
    ] = None,
    source: Annotated[
        bool, typer.Option("--source", help="Say where each equation comes from.")
    ] = False,
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Whose times order F&B, and tasks with collectives: when each equation would run is shown behind it.",
        ),
    ] = "cpu-core",
) -> None:
    """Print the IR of a model's pipeline, or of some of its tasks. Nothing is compiled.

    Tasks are printed in the order in which they run, F&B with the lane and the times of each equation.
    """
    taken = find_hardware(hardware)
    if task is not None and task not in (*TASK_KINDS, PAIR):
        raise UsageError(f"unknown task {task!r}; there are: {', '.join((*TASK_KINDS, PAIR))}")
    if schedule is None and task == PAIR:
        schedule = "dualpipev"
    stages = len(entries(split)) + 1 if split else ranks
    request = Request(
        model=model,
        config=config,
        frontends=names(frontend),
        num_ranks=stages,
        axes=axes(mesh),
        changes=changes(config_changes),
        microbatches=(microbatches,),
        split=entries(split),
        dtype=dtype,
        batch_size=batch_size,
    )
    job = plan_jobs(request)[0]
    if is_named(model):
        _check_stage(stage, stages)
    if schedule is not None:
        check_stages(schedule, stages if is_named(model) else None, microbatches)
    sizes = Sizes(config, dtype, job.batch_size, stages, job.mesh or {}, job.changes)
    workload = load_abstract(model, job.frontends[0], sizes, job.split)
    ranks_mesh = mesh_of(request)
    _, built = capture_program(
        workload.loss_fn,
        workload.model,
        workload.batch,
        num_microbatches=microbatches,
        split=workload.split,
        mesh=ranks_mesh,
        hardware=taken,
    )
    _check_stage(stage, built.num_stages)
    if schedule is not None:
        chosen = schedule_for(built, schedule, None, microbatches, hardware=taken, mesh=ranks_mesh)
        built = schedule_program(built, chosen.pairs, hardware=taken, mesh=ranks_mesh)
    if stage is None and task is None:
        sys.stdout.write(print_program(built, source=source))
        return
    tasks = [
        *((part.index, kind, graph) for part in built.stages for kind, graph in part.tasks.items()),
        *((forward, PAIR, graph) for (forward, _), graph in built.pairs.items()),
    ]
    graphs = (
        graph for index, kind, graph in tasks if stage in (None, index) and task in (None, kind)
    )
    if task == PAIR and not built.pairs:
        print(f"schedule {schedule} pairs no forward with a backward", file=sys.stderr)
    for number, graph in enumerate(graphs):
        sys.stdout.write("\n" if number else "")
        if source or task != PAIR:
            sys.stdout.write(print_graph(graph, source=source))
            continue
        summary, comment = describe_lanes(graph, lanes(graph, seconds_on(taken, ranks_mesh)))
        text = print_graph(graph, comment=comment)
        sys.stdout.write(text.replace("\n\n", f"\n\n// {summary}\n", 1))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; exit with code 2 for a usage error, 1 for any other that Plait raises."""
    sys.path.insert(0, os.getcwd())  # for package.module:build, as `python -m` does
    try:
        app(None if arguments is None else list(arguments))
    except PlaitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, MISUSES) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _check_stage(stage: int | None, num_stages: int) -> None:
    if stage is not None and stage >= num_stages:
        raise UsageError(f"there is no stage {stage}; stages are 0 to {num_stages - 1}")


if __name__ == "__main__":
    main()
