"""The neutral runtime: every schedule gives what running the microbatches one by one gives, and frees what it can."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy_arrays import numpy_plan
from stage_programs import inputs_for, layers, meaning

from plait.backends.order import linear_order
from plait.backends.runtime import StepInputs
from plait.backends.step import Step, add_shared
from plait.core_ir.build import Builder
from plait.core_ir.errors import ExecutionError, ScheduleError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.op import Array
from plait.core_ir.ops import control, elementwise, linalg, reduce
from plait.core_ir.passes.pipeline import build_program
from plait.core_ir.passes.shard_parameters import Sharding, shard_parameters
from plait.core_ir.program import Program
from plait.core_ir.schedule import Action, Schedule, build
from plait.core_ir.schedule.kinds import B, F
from plait.core_ir.types import TensorType, f32

ROWS, DIM = 2, 3
X = TensorType(f32, (ROWS, DIM))
MATRIX = TensorType(f32, (DIM, DIM))
SCALAR = TensorType(f32, ())


def chain(num_stages: int) -> Graph:
    """x -> x @ w0 -> | -> @ w1 -> | ..., loss = sum; w0 serves the last stage too; stage 0 counts its calls."""
    b = Builder("chain")
    weights = [b.input(MATRIX, "param", f"w{s}") for s in range(num_stages)]
    count = b.input(SCALAR, "buffer", "count")
    x = b.input(X, "batch", "x")
    loss_grad = b.input(SCALAR, "loss_grad", "")

    def product(a: Value, w: Value) -> Value:
        return b(linalg.dot_general, a, w, batch=((), ()), contract=((1,), (0,)))

    def input_grad(g: Value, w: Value) -> Value:
        return b(linalg.dot_general, g, w, batch=((), ()), contract=((1,), (1,)))

    def weight_grad(a: Value, g: Value) -> Value:
        return b(linalg.dot_general, a, g, batch=((), ()), contract=((0,), (0,)))

    counted = b(elementwise.add, count, b.full(SCALAR, 1.0))
    used = [*weights[:-1], weights[0] if num_stages > 1 else weights[-1]]
    inputs, h = [], b(elementwise.mul, x, b.expand(counted, X.shape))
    for stage, w in enumerate(used):
        inputs.append(h)
        h = product(h, w)
        if stage < num_stages - 1:
            (h,) = b.emit(control.boundary, h, index=stage, backward=False)
    loss = b(reduce.reduce_sum, h, dims=(0, 1))
    g = b.expand(loss_grad, X.shape)
    grads: dict[int, Value] = {}
    for stage in reversed(range(num_stages)):
        name = 0 if stage == num_stages - 1 and num_stages > 1 else stage
        part = weight_grad(inputs[stage], g)
        grads[name] = b(elementwise.add, grads[name], part) if name in grads else part
        if stage:
            g = input_grad(g, used[stage])
            (g,) = b.emit(control.boundary, g, index=stage - 1, backward=True)
    b.output(loss, "loss")
    for number, grad in grads.items():
        b.output(grad, "param_grad", f"w{number}")
    b.output(counted, "buffer_update", "count")
    return b.build()


def step_inputs(num_stages: int, num_microbatches: int, *, backward: bool = True) -> StepInputs:
    rng = np.random.default_rng(0)
    params = {f"w{s}": rng.normal(size=(DIM, DIM)).astype(np.float32) for s in range(num_stages)}
    microbatches = [
        {"x": rng.normal(size=(ROWS, DIM)).astype(np.float32)} for _ in range(num_microbatches)
    ]
    keys = np.zeros((num_microbatches, 2), np.uint32)
    buffers = {"count": np.zeros((), np.float32)}
    return StepInputs(params, buffers, microbatches, keys, 1.0, backward)


def run(program: Program, schedule: Schedule, inputs: StepInputs) -> tuple[Step, dict[str, Array]]:
    step = Step(numpy_plan(program), inputs)
    for action in linear_order(schedule, program):
        if inputs.backward or action.kind.forward:
            step.compute(action)
    return step, add_shared(step.gradients(), step.plan.arrays)


def expected(inputs: StepInputs, num_stages: int) -> tuple[list[float], dict[str, Array]]:
    """By hand in f64: the loss of each microbatch and the summed gradients."""
    weights = [inputs.params[f"w{s}"].astype(np.float64) for s in range(num_stages)]
    order = [*range(num_stages - 1), 0 if num_stages > 1 else num_stages - 1]
    grads = {f"w{s}": np.zeros((DIM, DIM)) for s in order}
    losses = []
    for count, microbatch in enumerate(inputs.microbatches, start=1):
        values = [microbatch["x"].astype(np.float64) * count]
        for s in order:
            values.append(values[-1] @ weights[s])
        losses.append(values[-1].sum())
        g = np.ones((ROWS, DIM))
        for position in reversed(range(num_stages)):
            grads[f"w{order[position]}"] += values[position].T @ g
            g = g @ weights[order[position]].T
    return losses, grads


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 5), (4, 3)])
def test_a_step_gives_the_gradients_and_frees_its_values(
    name: str, num_stages: int, num_microbatches: int
) -> None:
    program = build_program(chain(num_stages), num_stages)
    inputs = step_inputs(num_stages, num_microbatches)
    step, grads = run(program, build(name, num_stages, num_microbatches), inputs)
    losses, wanted = expected(inputs, num_stages)
    np.testing.assert_allclose(step.losses(), losses, rtol=1e-5)
    assert grads.keys() == wanted.keys()
    for key, grad in wanted.items():
        np.testing.assert_allclose(grads[key], grad, rtol=1e-5, atol=1e-5)
    assert step.buffers() == {"count": num_microbatches}
    assert not step._envs
    assert not step._outbox


@pytest.mark.parametrize("num_stages", [2, 4])
def test_schedules_agree_bit_for_bit(num_stages: int) -> None:
    program = build_program(chain(num_stages), num_stages)
    inputs = step_inputs(num_stages, 5)
    results = [run(program, build(n, num_stages, 5), inputs)[1] for n in ("gpipe", "1f1b", "zb-h1")]
    for other in results[1:]:
        for key, grad in results[0].items():
            assert grad.tobytes() == other[key].tobytes()


def test_a_forward_keeps_nothing_for_a_backward() -> None:
    program = build_program(chain(2), 2)
    step, grads = run(program, build("1f1b", 2, 3), step_inputs(2, 3, backward=False))
    assert len(step.losses()) == 3
    assert grads == {}
    assert all(not env for env in step._envs.values())


def test_a_schedule_that_the_edges_forbid_is_refused() -> None:
    program = build_program(chain(2), 2)
    schedule = Schedule.from_text(str(build("1f1b", 2, 1)).replace("0F0 0B0", "0B0 0F0"))
    with pytest.raises(ScheduleError, match="wait for each other"):
        linear_order(schedule, program)


def test_a_failing_task_is_named() -> None:
    program = build_program(chain(2), 2)
    plan = numpy_plan(program)

    def broken(operands: list[Array]) -> list[Array]:
        raise RuntimeError("no memory left")

    plan.tasks[1, "F"] = broken  # type: ignore[index]
    step = Step(plan, step_inputs(2, 2))
    order = linear_order(build("gpipe", 2, 2), program)
    first_broken = next(i for i, action in enumerate(order) if str(action) == "1F0")
    for action in order[:first_broken]:
        step.compute(action)
    message = r"stage 1, microbatch 0, action 1F0 \(task F\).*no memory left"
    with pytest.raises(ExecutionError, match=message):
        step.compute(order[first_broken])


def test_a_stage_is_gathered_when_it_is_first_read_and_freed_after() -> None:
    plain = layers([3, 3])
    program = shard_parameters(plain, Sharding("data"), 3)
    inputs = inputs_for(plain, 1)
    (whole,) = inputs.params.values()
    done: list[str] = []

    def begin_gather(shards: Sequence[Array]) -> Callable[[], list[Array]]:
        done.append(f"begun with {[x.shape for x in shards]}")

        def end() -> list[Array]:
            done.append("gathered")
            return [whole]

        return end

    def begin_reduction(grads: Sequence[Array]) -> Callable[[], list[Array]]:
        return lambda: [grads[0][:1] * 3]

    plan = replace(
        numpy_plan(program),
        step_tasks={(0, "UNSHARD"): begin_gather, (0, "REDUCE_GRAD"): begin_reduction},
    )
    step = Step(plan, replace(inputs, params={"w0": whole[:1]}))
    with pytest.raises(ExecutionError, match="reads 'w0' while it is sharded"):
        step.compute(Action(F, 0, 0))
    step.unshard(0)
    assert done == ["begun with [(1, 3)]"]
    step.compute(Action(F, 0, 0))
    assert done[1:] == ["gathered"]
    step.compute(Action(B, 0, 0))
    step.reshard(0)
    step.reduce_grad(0)
    assert not step.gradients()
    assert not step._params
    assert step.end_reductions() == [(0, "w0")]
    wanted = meaning(plain, inputs)["grads"]["w0"]
    np.testing.assert_array_equal(step.gradients()[0, "w0"], wanted[:1] * 3)
