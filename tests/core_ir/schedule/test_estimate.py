"""Times and memory of a hand-written program of two stages, against numbers computed by hand.

Stage 0 multiplies x [2, 2] by w0 [2, 3], stage 1 h [2, 3] by w1 [3, 4]; see `stage_programs.layers`. A flop takes a
second, memory no time.
"""

from dataclasses import replace

import pytest
from stage_programs import edge, layers

from plait.core_ir.graph import Port
from plait.core_ir.hardware import Hardware, Link
from plait.core_ir.passes.multiplex import multiplex
from plait.core_ir.program import Program
from plait.core_ir.schedule import build
from plait.core_ir.schedule.estimate import estimate

HARDWARE = Hardware(
    name="plain",
    flops_per_second={"f32": 1.0},
    bytes_per_second=1e30,
    memory_bytes=1e9,
    inside=Link(24.0),
    between=Link(12.0, 3e6),
    ranks_per_node=2,
)
# x w0: 2 * 2 * 3 * 2 flops, tanh: 6. g (1 - y y): 18; no stage below asks for a gradient of x. x g: as x w0.
F0, I0, W0 = 24 + 6, 18, 24
# h w1: 2 * 2 * 4 * 3, then tanh, y - t, its square, their sum: 8 each. g = (e + e) loss_grad (1 - y y): 40, g w1: 48.
F1, I1, W1 = 48 + 32, 40 + 48, 48
# h and its gradient: f32[2, 3].
MESSAGE_BYTES = 24


def program() -> Program:
    plain = layers([2, 3, 4])
    return replace(plain, edges=tuple(replace(e, num_bytes=MESSAGE_BYTES) for e in plain.edges))


def test_tasks_take_their_flops() -> None:
    times, _ = estimate(program(), [0, 1], HARDWARE)
    assert (times.f, times.i, times.w) == ((F0, F1), (I0, I1), (W0, W1))
    assert (times.b, times.fb, times.slowdown) == (None, None, 1.0)


def test_messages_take_the_link_between_their_ranks() -> None:
    inside, _ = estimate(program(), [0, 1], HARDWARE)
    assert inside.transfer == {(0, 1): 1.0, (1, 0): 1.0}
    assert inside.comm == {(0, 1): 0.0, (1, 0): 0.0}
    between, _ = estimate(program(), [0, 2], HARDWARE)
    assert between.transfer == {(0, 1): 2.0, (1, 0): 2.0}
    assert between.comm == {(0, 1): 3.0, (1, 0): 3.0}


def test_values_of_one_pair_of_stages_are_one_message() -> None:
    two = replace(
        program(),
        edges=(
            *program().edges,
            replace(
                edge(0, Port("activation", "u"), 1, Port("activation", "u"), "activation"),
                num_bytes=48,
            ),
        ),
    )
    times, _ = estimate(two, [0, 1], HARDWARE)
    assert times.transfer == {(0, 1): 3.0, (1, 0): 1.0}


@pytest.mark.parametrize(("nodes", "late"), [(2, 1.0), (1, 5.0)], ids=["inside", "between"])
def test_a_step_of_two_stages(nodes: int, late: float) -> None:
    hardware = replace(HARDWARE, ranks_per_node=nodes)
    times, memory = estimate(program(), [0, 1], hardware)
    schedule = build("zb-h1", 2, 1)
    timeline = schedule.simulate(times, memory, edges=program().edge_kinds())
    found = {str(t.action): (t.start, t.end) for t in timeline.tasks}
    f1 = F0 + late
    i1 = f1 + F1
    i0 = i1 + I1 + late
    assert found["0F0"] == (0, F0)
    assert found["1F0"] == (f1, i1)
    assert found["1I0"] == (i1, i1 + I1)
    assert found["1W0"] == (i1 + I1, i1 + I1 + W1)
    assert found["0I0"] == (i0, i0 + I0)
    assert found["0W0"] == (i0 + I0, i0 + I0 + W0)


def test_memory_is_what_ports_hold() -> None:
    _, memory = estimate(program(), [0, 1], HARDWARE)
    # Stage 0 keeps y f32[2, 3], and I hands over g of that type. Stage 1 keeps y and y - t, f32[2, 4], for I, and what
    # it was sent for W; I hands over g f32[2, 4].
    assert memory.activation == (24, 32 + 32 + 24)
    assert memory.handover == (24, 24 + 32)


def test_parameters_come_with_gradients_and_optimizer_state() -> None:
    times, memory = estimate(program(), [0, 1], replace(HARDWARE, bytes_per_second=28.0))
    # 6 and 12 of f32: parameter, gradient, two moments; a step reads these 16 bytes and writes 12 of them.
    assert memory.parameters == (6 * 16, 12 * 16)
    assert times.optimizer == (6.0, 12.0)


def test_a_frozen_parameter_is_only_held() -> None:
    times, memory = estimate(layers([2, 3, 4], frozen=[0]), [0, 1], HARDWARE)
    assert memory.parameters == (6 * 4, 12 * 16)
    assert times.optimizer == (0.0, pytest.approx(12 * 28 / 1e30))
    assert memory.activation == (0, 88)


def test_a_shared_parameter_is_held_once_a_rank() -> None:
    shared = layers([3, 3, 3, 3], shared=[0, 2])
    _, apart = estimate(shared, [0, 1, 2], HARDWARE)
    assert apart.parameters == (9 * 16,) * 3
    times, together = estimate(shared, [0, 1, 0], HARDWARE)
    # A partial gradient each.
    assert together.parameters == (9 * 16, 9 * 16, 9 * 4)
    assert times.optimizer[2] == 0  # type: ignore[index]


def test_pairs_take_the_time_of_their_joint_graph() -> None:
    plain = layers([2, 3, 4])
    stages = [
        replace(s, tasks={**s.tasks, "B": s.tasks["I"]}) for s in plain.stages
    ]  # an I alone: less than I and W apart
    joint = multiplex(stages[0].tasks["F"], stages[1].tasks["B"])
    times, _ = estimate(replace(plain, pairs={(0, 1): joint}), [0, 0], HARDWARE)
    assert times.fb == (F0 + I1, F1 + I1 + W1)


def test_sending_slows_computing_by_the_hardware() -> None:
    times, _ = estimate(program(), [0, 1], replace(HARDWARE, sms=3, comm_sms=1))
    assert times.slowdown == 1.5
