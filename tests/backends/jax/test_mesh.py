"""Engines on meshes with axes beside that of the stages, against what the programs mean on whole arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from mesh_programs import MeshProgram, experts, mesh_of, tensor_parallel
from stage_programs import PROGRAMS, inputs_for, layers, meaning

from plait.backends.jax import engines
from plait.backends.jax.engine_mpmd import MpmdEngine
from plait.backends.jax.private import spec
from plait.backends.replicas import ReplicatedEngine
from plait.backends.runtime import Engine, StepOutputs
from plait.core_ir.errors import UnsupportedError, UsageError
from plait.core_ir.mesh import Layout
from plait.core_ir.mesh import Mesh as Axes
from plait.core_ir.passes.pipeline import DEFAULT_PASSES, schedule_program
from plait.core_ir.program import Program
from plait.core_ir.schedule import Schedule, build

ENGINES = ("mpmd", "spmd")
NUM_MICROBATCHES = 4

both = pytest.mark.parametrize("engine", ENGINES)


def compiled(
    program: Program,
    schedule: Schedule,
    mesh: Axes,
    layouts: Mapping[str, Layout] | None = None,
    *,
    engine: str = "mpmd",
    num_devices: int = 8,
) -> Engine:
    program = schedule_program(program, schedule.pairs, DEFAULT_PASSES)
    devices = tuple(jax.devices()[:num_devices])
    return engines.build(
        program, schedule, engine=engine, device=devices, codegen=None, mesh=mesh, layouts=layouts
    )


def numpy(outputs: StepOutputs) -> Any:
    return jax.tree.map(np.asarray, dataclasses.asdict(outputs))


def check_alike(outputs: StepOutputs, others: StepOutputs) -> None:
    """AssertionError unless they differ by rounding alone."""

    def check(got: Any, want: Any) -> None:
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)

    jax.tree.map(check, numpy(outputs), numpy(others))


def tp(axes: Mapping[str, int], num_stages: int) -> MeshProgram:
    data = [axis for axis in axes if axis == "data"]
    return tensor_parallel(num_stages, mesh_of(axes, data=data, named=["model"]))


def ring(axes: Mapping[str, int], num_stages: int) -> MeshProgram:
    return tensor_parallel(num_stages, mesh_of(axes, named=["model"]), is_turned=True)


def ep(axes: Mapping[str, int], num_stages: int) -> MeshProgram:
    data = [axis for axis in axes if axis != "stage"]
    return experts(num_stages, mesh_of(axes, data=data, named=["expert"]))


CASES = [
    (tp, {"stage": 2, "model": 2}, "1f1b"),
    (tp, {"stage": 2, "model": 4}, "dualpipev"),
    (tp, {"data": 2, "stage": 2, "model": 2}, "zbv"),
    (tp, {"model": 2, "data": 2, "stage": 2}, "dualpipev"),
    (ring, {"model": 4, "stage": 2}, "zbv"),
    (ep, {"expert": 2, "stage": 2}, "zbv"),
    (ep, {"stage": 2, "expert": 4}, "1f1b"),
    (ep, {"stage": 2, "data": 2, "expert": 2}, "dualpipev"),
    (ep, {"data": 2, "expert": 2, "stage": 2}, "1f1b"),
]


@both
@pytest.mark.parametrize(("make", "axes", "name"), CASES)
def test_a_step(engine: str, make: Any, axes: dict[str, int], name: str) -> None:
    made: MeshProgram = make(axes, 2 if name == "1f1b" else 4)
    schedule = build(name, 2, NUM_MICROBATCHES)
    runs = compiled(made.program, schedule, made.mesh, made.layouts, engine=engine)
    inputs = made.inputs(NUM_MICROBATCHES)
    outputs = runs.run(inputs)
    made.check(outputs, inputs)
    again = runs.run(inputs)
    jax.tree.map(np.testing.assert_array_equal, numpy(outputs), numpy(again))


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("mpmd", name) for name in PROGRAMS),
        *(("spmd", name) for name in ("every_kind_of_value", "unlike", "tied")),
    ],
)
def test_an_axis_that_nothing_uses_changes_nothing(engine: str, name: str) -> None:
    """Every rank of it computes the same: changed buffers and random numbers too."""
    program, inputs = PROGRAMS[name], inputs_for(PROGRAMS[name], 3)
    schedule = build("zb-h1", program.num_stages, 3)
    mesh = mesh_of({"stage": program.num_stages, "idle": 2}, named=["idle"])
    outputs = compiled(program, schedule, mesh, engine=engine).run(inputs)
    alone = MpmdEngine(program, schedule, devices=jax.devices()).run(inputs)
    check_alike(outputs, alone)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("mpmd", name) for name in PROGRAMS if name != "every_kind_of_value"),
        *(("spmd", name) for name in ("skip", "tied", "frozen")),
    ],
)
def test_parts_are_microbatches(engine: str, name: str) -> None:
    program = PROGRAMS[name]
    inputs = inputs_for(program, 6)
    mesh = mesh_of({"data": 2, "stage": program.num_stages}, data=["data"])
    schedule = build("1f1b", program.num_stages, 3)
    outputs = compiled(program, schedule, mesh, engine=engine).run(inputs)
    expected = meaning(program, inputs)
    np.testing.assert_allclose(np.asarray(outputs.loss), expected["loss"], rtol=1e-6)
    assert outputs.grads.keys() == expected["grads"].keys()
    for group in ("grads", "aux"):
        for key, want in expected[group].items():
            got = np.asarray(getattr(outputs, group)[key])
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_replicas_on_too_few_devices_take_turns() -> None:
    program, schedule = layers([3] * 5, shared=(0, 3)), build("zbv", 2, NUM_MICROBATCHES)
    mesh = mesh_of({"stage": 2, "data": 2, "model": 1}, data=["data"], named=["model"])
    inputs = inputs_for(program, 2 * NUM_MICROBATCHES)
    together = compiled(program, schedule, mesh)
    in_turn = compiled(program, schedule, mesh, num_devices=1)
    assert isinstance(together, MpmdEngine)
    assert isinstance(in_turn, ReplicatedEngine)
    check_alike(together.run(inputs), in_turn.run(inputs))


def test_other_axes_need_devices_of_their_own() -> None:
    made = tp({"stage": 2, "model": 2}, 2)
    with pytest.raises(UsageError, match="xla_force_host_platform_device_count=4"):
        compiled(made.program, build("1f1b", 2, 2), made.mesh, made.layouts, num_devices=3)


@both
def test_forward_alone(engine: str) -> None:
    made = ep({"stage": 2, "data": 2, "expert": 2}, 2)
    inputs = dataclasses.replace(made.inputs(3), backward=False)
    runs = compiled(made.program, build("1f1b", 2, 3), made.mesh, made.layouts, engine=engine)
    made.check(runs.run(inputs), inputs)


@both
def test_another_order_of_the_same_tasks(engine: str) -> None:
    made = tp({"stage": 2, "data": 2, "model": 2}, 2)
    inputs = made.inputs(NUM_MICROBATCHES)
    runs = compiled(
        made.program,
        build("gpipe", 2, NUM_MICROBATCHES),
        made.mesh,
        made.layouts,
        engine=engine,
    )
    first = numpy(runs.run(inputs))
    runs.reschedule(build("zb-h1", 2, NUM_MICROBATCHES))
    jax.tree.map(np.testing.assert_array_equal, first, numpy(runs.run(inputs)))


def test_times_and_spans_of_a_step() -> None:
    made = tp({"stage": 2, "data": 2, "model": 2}, 4)
    runs = compiled(made.program, build("dualpipev", 2, NUM_MICROBATCHES), made.mesh, made.layouts)
    inputs = made.inputs(NUM_MICROBATCHES)
    times = runs.profile(inputs)
    assert np.shape(times.f) == (4,)
    assert np.all(np.asarray(times.f) > 0)
    rows = runs.measure(inputs)
    assert [len(row) for row in rows] == [
        sum(action.kind.is_compute for action in build("dualpipev", 2, 4).rank(rank))
        for rank in (0, 1)
    ]


@both
def test_parameters_that_lie_over_devices_are_taken_so(engine: str) -> None:
    """Each gradient then lies as its parameter does."""
    made = tp({"stage": 2, "data": 2, "model": 2}, 2)
    inputs = made.inputs(NUM_MICROBATCHES)
    grid = np.array(jax.devices()).reshape(2, 2, 2)
    axes = Mesh(grid, ("stage", "data", "model"))
    params = {
        name: jax.device_put(x, NamedSharding(axes, spec(*made.layouts.get(name, ()))))
        for name, x in inputs.params.items()
    }
    runs = compiled(
        made.program, build("1f1b", 2, NUM_MICROBATCHES), made.mesh, made.layouts, engine=engine
    )
    outputs = runs.run(dataclasses.replace(inputs, params=params))
    made.check(outputs, inputs)
    for name, grad in outputs.grads.items():
        assert grad.sharding == params[name].sharding


@both
def test_a_part_of_a_parameter_is_refused(engine: str) -> None:
    made = tp({"stage": 2, "model": 2}, 2)
    inputs = made.inputs(2)
    params: dict[str, Any] = {**inputs.params, "up1": inputs.params["up1"][:, :4]}
    runs = compiled(made.program, build("1f1b", 2, 2), made.mesh, made.layouts, engine=engine)
    with pytest.raises(UsageError, match=r"'up1' is cut over model and .* whole, as f32\[4, 8\]"):
        runs.run(dataclasses.replace(inputs, params=params))


@both
def test_a_buffer_that_changes_along_parts_is_refused(engine: str) -> None:
    program = PROGRAMS["every_kind_of_value"]
    mesh = mesh_of({"stage": 2, "data": 2}, data=["data"])
    with pytest.raises(UnsupportedError, match="buffer 'mean' changes from microbatch"):
        compiled(program, build("1f1b", 2, 2), mesh, engine=engine)
