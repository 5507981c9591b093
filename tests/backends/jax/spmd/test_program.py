"""The form of the one program: loops and pools as XLA keeps them, and its lowering for a platform that is not here."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from mesh_programs import experts, mesh_of
from stage_programs import PROGRAMS, layers

import plait
from plait.backends.jax.engine_spmd import SpmdEngine, stage_mesh, trace_program, whole_mesh
from plait.backends.jax.hlo import parse
from plait.backends.jax.submesh import submeshes
from plait.capturing import capture_program
from plait.core_ir.passes.multiplex import multiplex_pairs
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.schedule import Action, Schedule, build
from plait.core_ir.schedule.kinds import B, F

SCHEDULES = ("gpipe", "1f1b", "zb-h1")


def test_slots_are_as_many_as_the_schedule_keeps_alive() -> None:
    program, num_microbatches = PROGRAMS["alike"], 6
    rows = {
        name: SpmdEngine(program, build(name, 4, num_microbatches)).plan().num_rows["saved.I"]
        for name in ("gpipe", "1f1b")
    }
    assert rows == {"gpipe": num_microbatches, "1f1b": 4}


def one_microbatch_after_the_other(num_stages: int, num_microbatches: int) -> Schedule:
    """All stages on one rank: every pool has one slot, so that no row that a task reads depends on the table."""
    stages = range(num_stages)
    row = [
        action
        for m in range(num_microbatches)
        for action in (
            *(Action(F, s, m) for s in stages),
            *(Action(B, s, m) for s in reversed(stages)),
        )
    ]
    return Schedule.from_actions("one by one", (0,) * num_stages, num_microbatches, [row])


def products_by_depth(program: Program, schedule: Schedule) -> Counter[int]:
    """How many products stand in how many loops: in that over ticks, and in that of their task."""
    module = parse(SpmdEngine(program, schedule).compiled_text())
    return Counter(depth for depth, instruction in module.walk() if instruction.is_product)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_product_runs_outside_its_tasks_loop(num_ranks: int, schedule: str) -> None:
    program = layers([3] * (num_ranks + 1))
    assert set(products_by_depth(program, build(schedule, num_ranks, 3))) == {2}


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_no_product_runs_outside_its_tasks_loop_where_nothing_depends_on_the_table(
    num_stages: int,
) -> None:
    program = layers([3] * (num_stages + 1))
    schedule = one_microbatch_after_the_other(num_stages, 3)
    assert set(products_by_depth(program, schedule)) == {2}


def test_no_pool_is_copied_on_every_tick() -> None:
    engine = SpmdEngine(layers([3] * 5), build("1f1b", 4, 3))
    pools = {
        f"{t.dtype.name}[{','.join(map(str, (engine.plan().num_rows[pool], *t.shape)))}]"
        for pool, layout in engine.plan().layouts.items()
        for t in layout.fields
    }
    copies = [
        instruction.type.split("{")[0]
        for depth, instruction in parse(engine.compiled_text()).walk()
        if depth >= 1 and instruction.opcode == "copy"
    ]
    assert pools
    assert not pools & set(copies)


def overlapped() -> tuple[Program, Schedule]:
    """Four stages h -> tanh(h @ w) in a V on two ranks, with the pairs of dualpipev."""

    def loss_fn(model: list[jax.Array], batch: jax.Array) -> jax.Array:
        for weight in model[:-1]:
            batch = plait.stage_boundary(jnp.tanh(batch @ weight))
        return jnp.sum(jnp.tanh(batch @ model[-1]) ** 2)

    model, batch = [jnp.full((3, 3), 0.1 * s) for s in range(1, 5)], jnp.ones((8, 3))
    _, program = capture_program(loss_fn, model, batch, num_microbatches=4)
    schedule = build("dualpipev", 2, 4)
    return multiplex_pairs(program, schedule.pairs), schedule


def test_a_pair_is_one_body_of_its_own() -> None:
    program, schedule = overlapped()
    assert program.pairs
    assert set(products_by_depth(program, schedule)) == {2}
    mesh = stage_mesh(jax.devices()[:2])
    with jax.enable_x64(True):
        plan, traced = trace_program(program, schedule, mesh)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert plan.kinds == ("F&B", "F", "I", "W")
    assert text.count("stablehlo.while") == 1 + len(plan.kinds)
    runs = {kind: int(plan.table[:, :, plan.columns["run", kind]].sum()) for kind in plan.kinds}
    pairs = sum(action.partner is not None for rank in (0, 1) for action in schedule.rank(rank))
    assert runs == {"F&B": pairs, "F": 16 - pairs, "I": 16 - pairs, "W": 16 - pairs}


@pytest.mark.parametrize("kinds", [("F", "I", "W"), ("F",)], ids="".join)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_lowers_for_cuda_on_this_machine(
    name: str, schedule: str, kinds: tuple[TaskKind, ...]
) -> None:
    program = PROGRAMS[name]
    mesh = stage_mesh(jax.devices()[: program.num_stages])
    with jax.enable_x64(True):
        _, traced = trace_program(program, build(schedule, program.num_stages, 3), mesh, kinds)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") == 1 + len(kinds)
    assert ("stablehlo.collective_permute" in text) == (program.num_stages > 1)


def on_a_mesh(kinds: tuple[TaskKind, ...] = ("F", "I", "W")) -> jax.stages.Traced:
    """Two stages whose tasks exchange rows over one axis, of a mesh with a third."""
    mesh = mesh_of({"data": 2, "stage": 2, "expert": 2}, data=["data", "expert"], named=["expert"])
    made = experts(2, mesh)
    devices = whole_mesh(submeshes(mesh, jax.devices()), mesh)
    with jax.enable_x64(True):
        _, traced = trace_program(made.program, build("1f1b", 2, 3), devices, kinds)
    return traced


def test_on_a_mesh_no_product_and_no_exchange_runs_outside_its_tasks_loop() -> None:
    with jax.enable_x64(True):
        module = parse(on_a_mesh().lower().compile().as_text() or "")
    depths: dict[bool, set[int]] = {True: set(), False: set()}
    for depth, instruction in module.walk():
        if instruction.is_product or instruction.opcode.startswith("all-to-all"):
            depths[instruction.is_product].add(depth)
    assert depths == {True: {2}, False: {2}}


def test_on_a_mesh_a_program_lowers_for_cuda_on_this_machine() -> None:
    with jax.enable_x64(True):
        text = on_a_mesh().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") == 4
    assert text.count("stablehlo.all_to_all") == 2 * 2 * 2  # of F and I, of each of two stages
