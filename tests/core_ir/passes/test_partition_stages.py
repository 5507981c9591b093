"""partition_stages on joint programs written by hand: what crosses, where it is computed, what is refused."""

from collections.abc import Sequence

import numpy as np
import pytest
from joint_programs import (
    cut,
    differentiate,
    matmul,
    matrix,
    random_inputs,
    run_joint,
    run_program,
    total,
)

from plait.core_ir.build import Builder
from plait.core_ir.errors import PartitionError
from plait.core_ir.graph import Graph, Source, Value
from plait.core_ir.ops.control import barrier, boundary, extern, scan
from plait.core_ir.ops.elementwise import add, compare, convert, cos, exp, mul, sin, tanh
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.ops.random import fold_in, random_bits
from plait.core_ir.ops.reduce import reduce_sum
from plait.core_ir.ops.shape import iota
from plait.core_ir.passes.partition_stages import partition_stages
from plait.core_ir.passes.split_backward import split_backward
from plait.core_ir.program import Program, TaskKind
from plait.core_ir.types import KEY, TensorType, f32, f64, u32
from plait.core_ir.verify import verify, verify_program


def cut_and_check(graph: Graph, num_stages: int, *, exact: bool = True) -> Program:
    """The program, split too, whose tasks give what the joint graph gives."""
    program = verify_program(split_backward(partition_stages(verify(graph), num_stages)))
    inputs = random_inputs(graph)
    expected = run_joint(graph, inputs)
    for backward in (("B",), ("I", "W")):
        found = run_program(program, inputs, backward)
        assert found.keys() == expected.keys()
        for port, array in expected.items():
            if exact:
                np.testing.assert_array_equal(found[port], array, err_msg=str(port))
            else:
                np.testing.assert_allclose(found[port], array, rtol=1e-12, err_msg=str(port))
    return program


def edges(program: Program, kind: str) -> list[tuple[int, int]]:
    """Source and target of each edge of a kind."""
    return sorted((e.source, e.target) for e in program.edges if e.kind == kind)


def ops(program: Program, stage: int, kind: TaskKind) -> list[str]:
    """Names of the ops of a task."""
    return [eqn.op.name for eqn in program.task(stage, kind).eqns]


def names(program: Program, stage: int, kind: TaskKind, role: str) -> list[str]:
    """Names of the output ports of one role."""
    return [p.name for p in program.task(stage, kind).output_ports if p.role == role]


def chain(num_stages: int, *, frozen: Sequence[int] = ()) -> Graph:
    """Stages h -> tanh(h w), cut between them."""
    b = Builder("chain")
    h = matrix(b, "batch", "x", 2, 3)
    weights = [matrix(b, "param", f"w{i}", 3, 3) for i in range(num_stages)]
    for index, w in enumerate(weights):
        if index:
            (h,) = cut(b, index - 1, h)
        h = b(tanh, matmul(b, h, w))
    trainable = {f"w{i}": w for i, w in enumerate(weights) if i not in frozen}
    return differentiate(b, total(b, h), trainable)


def test_a_chain_has_one_edge_each_way_at_every_cut() -> None:
    program = cut_and_check(chain(4), 4)
    assert edges(program, "activation") == [(0, 1), (1, 2), (2, 3)]
    assert edges(program, "gradient") == [(1, 0), (2, 1), (3, 2)]
    assert all(e.num_bytes == 2 * 3 * 8 for e in program.edges)
    assert program.notes == tuple(
        f"cut {k}: 1 values, 48 bytes forward; 1 values, 48 bytes back" for k in range(3)
    )
    for stage in range(4):
        assert ops(program, stage, "F")[:2] == ["dot_general", "tanh"]
        assert not any(
            eqn.op is boundary for t in program.stages[stage].tasks.values() for eqn in t.eqns
        )


def test_equations_that_read_no_port_are_reused() -> None:
    graph = chain(2)
    program = partition_stages(graph, 2)
    kept = {eqn for stage in program.stages for task in stage.tasks.values() for eqn in task.eqns}
    assert any(eqn in kept for eqn in graph.eqns)


def test_one_stage_needs_no_marker() -> None:
    program = cut_and_check(chain(1), 1)
    assert program.edges == ()
    assert program.notes == ()


def test_a_skip_connection_is_an_edge_between_stages_that_are_no_neighbours() -> None:
    b = Builder("skip")
    x, w0, w1, w2 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(3)),
    )
    first = b(tanh, matmul(b, x, w0))
    (h,) = cut(b, 0, first)
    (h,) = cut(b, 1, matmul(b, h, w1))
    loss = total(b, b(add, matmul(b, h, w2), first))
    program = cut_and_check(differentiate(b, loss, {"w0": w0, "w1": w1, "w2": w2}), 3)
    assert edges(program, "activation") == [(0, 1), (0, 2), (1, 2)]
    assert edges(program, "gradient") == [(1, 0), (2, 0), (2, 1)]
    assert "add" in ops(program, 0, "B")  # the two cotangents are added where the value was made
    assert any("without passing a boundary" in note for note in program.notes)


def test_a_value_read_by_two_later_stages_gets_one_gradient_from_each() -> None:
    b = Builder("fan")
    x, w0 = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w0", 3, 3)
    first = b(tanh, matmul(b, x, w0))
    h = first
    for index in range(2):
        (h,) = cut(b, index, h)
        h = b(mul, b(tanh, h), first)
    program = cut_and_check(differentiate(b, total(b, h), {"w0": w0}), 3)
    assert edges(program, "activation") == [(0, 1), (0, 1), (0, 2), (1, 2)]
    assert edges(program, "gradient") == [(1, 0), (1, 0), (2, 0), (2, 1)]
    sent = [e.output for e in program.edges if e.source == 0 and e.kind == "activation"]
    assert len(set(sent)) == 1  # one value, one port
    assert ops(program, 0, "B").count("add") == 2
    assert "add" not in ops(program, 1, "B")


def test_a_marker_inside_a_residual_connection_has_two_values_cross() -> None:
    b = Builder("residual")
    x, w0, w1 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(2)),
    )
    h = b(tanh, matmul(b, x, w0))
    (inner,) = cut(b, 0, h)
    loss = total(b, b(tanh, b(add, h, matmul(b, inner, w1))))
    program = cut_and_check(differentiate(b, loss, {"w0": w0, "w1": w1}), 2)
    assert edges(program, "activation") == [(0, 1)] * 2
    assert edges(program, "gradient") == [(1, 0)] * 2
    assert program.notes[0] == "cut 0: 2 values, 96 bytes forward; 2 values, 96 bytes back"


def test_r15_a_table_without_gradient_has_no_gradient_message() -> None:
    b = Builder("r15")
    x = matrix(b, "batch", "x", 2, 3)
    weights = [matrix(b, "param", f"w{i}", 3, 3) for i in range(4)]
    big = b(iota, dtype=f64, shape=(3, 4000), dim=0)
    # A product makes the table too dear to be computed again in each stage.
    table = b(cos, b(dot_general, big, big, batch=((), ()), contract=((1,), (1,))))
    table = b.expand(b(reduce_sum, table, dims=(1,)), (2, 3))
    h = matmul(b, x, weights[0])
    for index in range(3):
        table, h = cut(b, index, table, h)
        h = matmul(b, h, weights[index + 1])
        h = b(mul, h, table) if index < 2 else h
    graph = differentiate(b, total(b, h), {f"w{i}": w for i, w in enumerate(weights)})
    program = cut_and_check(graph, 4)
    assert edges(program, "gradient") == [(1, 0), (2, 1), (3, 2)]
    assert edges(program, "activation") == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]
    passed_on = program.edges_from(1, "activation")[0]
    received = program.edges_into(1, "activation")[0]
    assert passed_on.output == received.input  # the same value of stage 1: one port


def test_a_cheap_table_is_computed_in_each_stage_even_behind_markers() -> None:
    b = Builder("rotary")
    x = matrix(b, "batch", "x", 2, 3)
    weights = [matrix(b, "param", f"w{i}", 3, 3) for i in range(3)]
    table = b(cos, b(iota, dtype=f64, shape=(2, 3), dim=1))
    h = matmul(b, x, weights[0])
    for index in range(2):
        table, h = cut(b, index, table, h)
        h = matmul(b, b(mul, h, table), weights[index + 1])
    graph = differentiate(b, total(b, h), {f"w{i}": w for i, w in enumerate(weights)})
    program = cut_and_check(graph, 3)
    assert edges(program, "activation") == [(0, 1), (1, 2)]
    assert [("cos" in ops(program, s, "F")) for s in range(3)] == [False, True, True]


def test_a_batch_leaf_is_read_by_each_stage_that_uses_it() -> None:
    b = Builder("mask")
    x, mask, w = (
        matrix(b, "batch", "x", 2, 3),
        matrix(b, "batch", "mask", 2, 3),
        matrix(b, "param", "w", 3, 3),
    )
    h, passed = cut(b, 0, matmul(b, x, w), mask)
    h, passed = cut(b, 1, h, passed)
    program = cut_and_check(differentiate(b, total(b, b(mul, h, passed)), {"w": w}), 3)
    assert edges(program, "activation") == [(0, 1), (1, 2)]
    assert [stage.batch for stage in program.stages] == [("x",), (), ("mask",)]


def test_random_bits_are_computed_where_they_are_used_and_kept_for_the_backward() -> None:
    b = Builder("dropout")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    key = b.input(KEY, "rng_key", "")
    h = matmul(b, x, w)
    for index in range(2):
        (h,) = cut(b, index, h)
        bits = b(random_bits, b(fold_in, key, b.literal(index, u32)), dtype=u32, shape=(2, 3))
        keep = b(compare, bits, b.full(bits.type, 2**31), direction="lt")
        h = b(mul, h, b(convert, keep, dtype=f64))
    program = cut_and_check(differentiate(b, total(b, h), {"w": w}), 3)
    assert edges(program, "activation") == [(0, 1), (1, 2)]
    for stage in (1, 2):
        assert ops(program, stage, "F").count("random_bits") == 1
        assert "random_bits" not in ops(program, stage, "B")


def test_r63_a_tied_table_gives_a_part_of_its_gradient_in_each_stage() -> None:
    b = Builder("tied")
    tokens = matrix(b, "batch", "x", 2, 2)  # one-hot rows of [0, 1]
    table = matrix(b, "param", "table", 2, 2)
    (h,) = cut(b, 0, matmul(b, tokens, table))
    (h,) = cut(b, 1, h)
    logits = matmul(b, h, b.transpose(table, (1, 0)))
    graph = differentiate(b, total(b, logits), {"table": table})
    program = cut_and_check(graph, 3)
    assert [names(program, s, "B", "param_grad") for s in range(3)] == [["table"], [], ["table"]]
    assert program.shared_params == {"table": (0, 2)}
    assert edges(program, "gradient") == [(1, 0), (2, 1)]  # no parameter gradient crosses
    inputs = {
        ("batch", "x"): np.eye(2),
        ("param", "table"): np.array([[1.0, 2.0], [3.0, 4.0]]),
        ("loss_grad", ""): np.array(1.0),
    }
    found = run_program(program, inputs, ("I", "W"))
    assert found["loss", ""] == 52.0
    np.testing.assert_array_equal(found["param_grad", "table"], [[8.0, 12.0], [8.0, 12.0]])


def test_a_parameter_of_three_stages_has_its_sum_taken_apart() -> None:
    b = Builder("shared")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    h = matmul(b, x, w)
    for index in range(2):
        (h,) = cut(b, index, b(tanh, h))
        h = matmul(b, matmul(b, h, w), w)  # twice in each later stage
    program = cut_and_check(differentiate(b, total(b, h), {"w": w}), 3, exact=False)
    assert [names(program, s, "B", "param_grad") for s in range(3)] == [["w"]] * 3
    assert [ops(program, s, "W").count("add") for s in range(3)] == [0, 1, 1]
    assert all(e.num_bytes == 48 for e in program.edges)


def test_a_sum_behind_a_transpose_is_taken_apart_too() -> None:
    b = Builder("shared_transpose")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    t = b(exp, b.transpose(w, (1, 0)))
    plain = b.transpose(w, (1, 0))
    (h,) = cut(b, 0, b(tanh, matmul(b, x, plain)))
    program = cut_and_check(
        differentiate(b, total(b, matmul(b, matmul(b, h, plain), t)), {"w": w}), 2, exact=False
    )
    assert [names(program, s, "B", "param_grad") for s in range(2)] == [["w"], ["w"]]
    assert edges(program, "gradient") == [(1, 0)]


@pytest.mark.parametrize(
    ("frozen", "gradients"),
    [
        ((0,), [(2, 1), (3, 2)]),
        ((0, 1), [(3, 2)]),
        ((3,), [(1, 0), (2, 1), (3, 2)]),
        ((1, 2, 3), [(1, 0), (2, 1), (3, 2)]),
        ((0, 1, 2), []),
        ((0, 1, 2, 3), []),
    ],
)
def test_r66_no_gradient_goes_below_the_last_trainable_parameter(
    frozen: tuple[int, ...], gradients: list[tuple[int, int]]
) -> None:
    program = cut_and_check(chain(4, frozen=frozen), 4)
    assert edges(program, "gradient") == gradients
    for stage in range(4):
        given = names(program, stage, "B", "param_grad")
        assert given == ([] if stage in frozen else [f"w{stage}"])
    for stage in range(4):
        if stage in frozen:
            assert program.task(stage, "W").eqns == ()
    if frozen == (0, 1):
        assert all(program.task(s, kind).eqns == () for s in (0, 1) for kind in ("B", "I", "W"))


def test_buffers_are_updated_where_their_inputs_are() -> None:
    b = Builder("batch_norm")
    x, w0, w1 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(2)),
    )
    means = [matrix(b, "buffer", f"norm{i}.mean", 3) for i in range(2)]
    counts = [b.input(TensorType(f64, ()), "buffer", f"norm{i}.count") for i in range(2)]
    h = matmul(b, x, w0)
    updates = {}
    for index, mean in enumerate(means):
        if index:
            (h,) = cut(b, 0, matmul(b, h, w1))
        updates[f"norm{index}.mean"] = b(add, mean, b(reduce_sum, h, dims=(0,)))
        updates[f"norm{index}.count"] = b(add, counts[index], b.literal(1.0, f64))
    for name, value in updates.items():
        b.output(value, "buffer_update", name)
    program = cut_and_check(differentiate(b, total(b, h), {"w0": w0, "w1": w1}), 2)
    for stage in range(2):
        assert set(names(program, stage, "F", "buffer_update")) == {
            f"norm{stage}.mean",
            f"norm{stage}.count",
        }
        assert program.stages[stage].updates_buffers


def test_a_changing_buffer_is_sent_to_a_later_stage_that_reads_it() -> None:
    graph = _reads_buffer(update_at=0, read_at=1)
    program = cut_and_check(graph, 2)
    assert program.stages[0].buffers == ("m",)
    assert program.stages[1].buffers == ()
    assert edges(program, "activation") == [(0, 1), (0, 1)]


def test_a_changing_buffer_that_an_earlier_stage_reads_is_refused() -> None:
    with pytest.raises(
        PartitionError, match=r"boundary 0 .*earlier stage.*buffer 'm', which stage 1 updates"
    ):
        partition_stages(_reads_buffer(update_at=1, read_at=0), 2)


def _reads_buffer(*, update_at: int, read_at: int) -> Graph:
    b = Builder("buffer")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    m = matrix(b, "buffer", "m", 2, 3)
    h = matmul(b, x, w)
    for stage in range(2):
        if stage:
            (h,) = cut(b, 0, h)
        with b.at(Source("layer", "", 0)):
            if stage == read_at:
                h = b(mul, h, m)
            if stage == update_at:
                b.output(b(add, m, h), "buffer_update", "m")
    return differentiate(b, total(b, h), {"w": w})


def test_aux_outputs_come_from_any_stage() -> None:
    b = Builder("aux")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    h = matmul(b, x, w)
    b.output(b(sin, h), "aux", "early")
    b.output(x, "aux", "input")
    (h,) = cut(b, 0, h)
    b.output(b(cos, h), "aux", "late")
    program = cut_and_check(differentiate(b, total(b, h), {"w": w}), 2)
    assert set(names(program, 0, "F", "aux")) == {"early", "input"}
    assert names(program, 1, "F", "aux") == ["late"]


def test_stages_that_compute_nothing_and_cuts_that_nothing_crosses_are_reported() -> None:
    b = Builder("empty")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    (h,) = cut(b, 0, x)
    (h,) = cut(b, 1, h)
    program = cut_and_check(differentiate(b, total(b, matmul(b, h, w)), {"w": w}), 3)
    assert program.edges == ()
    assert program.notes == (
        "cut 0: nothing forward; nothing back",
        "cut 1: nothing forward; nothing back",
        "stage 0 computes nothing",
        "stage 1 computes nothing",
    )


def test_an_identity_stage_passes_its_values_on() -> None:
    b = Builder("identity")
    x, w0, w1 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(2)),
    )
    (h,) = cut(b, 0, matmul(b, x, w0))
    (h,) = cut(b, 1, h)
    program = cut_and_check(differentiate(b, total(b, matmul(b, h, w1)), {"w0": w0, "w1": w1}), 3)
    assert edges(program, "activation") == [(0, 1), (1, 2)]
    assert edges(program, "gradient") == [(1, 0), (2, 1)]
    assert program.task(1, "F").inputs == program.task(1, "F").outputs


def test_a_loss_that_is_ready_early_sends_no_gradient_from_later_stages() -> None:
    b = Builder("early")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    h = matmul(b, x, w)
    loss = total(b, h)
    (late,) = cut(b, 0, h)
    b.output(b(sin, late), "aux", "late")
    program = cut_and_check(differentiate(b, loss, {"w": w}), 2)
    assert names(program, 0, "F", "loss") == [""]
    assert edges(program, "gradient") == []


def test_a_penalty_on_every_parameter_sends_a_number_not_the_parameter() -> None:
    b = Builder("penalty")
    x, w0, w1 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(2)),
    )
    (h,) = cut(b, 0, b(tanh, matmul(b, x, w0)))
    squares = b(add, total(b, b(mul, w0, w0)), total(b, b(mul, w1, w1)))
    loss = b(add, total(b, matmul(b, h, w1)), squares)
    program = cut_and_check(differentiate(b, loss, {"w0": w0, "w1": w1}), 2)
    assert program.shared_params == {}
    assert sorted(e.num_bytes for e in program.edges) == [8, 48, 48]


def test_recomputation_starts_at_the_value_that_crossed() -> None:
    graph = _with_recomputation(marked=True)
    program = cut_and_check(graph, 2)
    assert ops(program, 1, "B").count("tanh") == 1  # of stage 1 alone, from its own input
    assert ops(program, 0, "B").count("tanh") == 1
    assert edges(program, "activation") == [(0, 1)]


def _with_recomputation(*, marked: bool) -> Graph:
    """Two stages whose backwards compute both again from the input of the first, behind a barrier."""
    b = Builder("remat")
    x, w0, w1 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(2)),
    )
    (h,) = cut(b, 0, b(tanh, matmul(b, x, w0)))
    b.output(total(b, b(tanh, matmul(b, h, w1))), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 3))
    again = b(tanh, matmul(b, b(barrier, x), w0))
    (passed,) = cut(b, 0, again)
    y = b(tanh, matmul(b, passed, w1))
    dy = b(mul, g, b(mul, y, y))
    b.output(b(dot_general, passed, dy, batch=((), ()), contract=((0,), (0,))), "param_grad", "w1")
    dh = b(dot_general, dy, w1, batch=((), ()), contract=((1,), (1,)))
    (dh,) = b.emit(boundary, dh, index=0, backward=True)
    da = b(mul, dh, b(mul, again, again))
    b.output(b(dot_general, x, da, batch=((), ()), contract=((0,), (0,))), "param_grad", "w0")
    return b.build()


def test_views_and_casts_of_parameters_are_made_again_rather_than_kept() -> None:
    b = Builder("views")
    x = matrix(b, "batch", "x", 2, 3)
    w = b.input(TensorType(f32, (3, 3)), "param", "w")
    wide = b(convert, w, dtype=f64)
    h = b(tanh, matmul(b, x, b.transpose(wide, (1, 0))))
    scale = b.expand(b(reduce_sum, h, dims=(0,)), (2, 3))
    b.output(total(b, b(mul, h, scale)), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 3))
    dh = b(mul, g, scale)
    b.output(
        b(convert, matmul(b, b.transpose(dh, (1, 0)), matmul(b, h, wide)), dtype=f32),
        "param_grad",
        "w",
    )
    program = cut_and_check(b.build(), 1)
    kept = [v.type for _, v in program.task(0, "F").outputs_of("residual")]
    assert sorted(t.shape for t in kept) == [(2, 3), (3,)]
    assert "convert" in ops(program, 0, "B")


def test_the_backward_sends_a_later_forward_value_back_where_it_is_needed() -> None:
    b = Builder("back")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    h = matmul(b, x, w)
    (k,) = cut(b, 0, h)
    late = b(tanh, k)
    b.output(total(b, late), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 3))
    (g,) = b.emit(boundary, g, index=0, backward=True)
    # The product with a value of stage 1 stands behind the marker, in stage 0.
    b.output(
        b(dot_general, x, b(mul, g, late), batch=((), ()), contract=((0,), (0,))), "param_grad", "w"
    )
    program = cut_and_check(b.build(), 2)
    assert edges(program, "gradient") == [(1, 0), (1, 0)]


def test_a_marker_over_a_zero_cotangent_does_not_cut() -> None:
    b = Builder("zero")
    x, w0, w1 = (
        matrix(b, "batch", "x", 2, 3),
        *(matrix(b, "param", f"w{i}", 3, 3) for i in range(2)),
    )
    h, side = cut(b, 0, matmul(b, x, w0), b(sin, matmul(b, x, w0)))
    b.output(total(b, b(add, matmul(b, h, w1), b(mul, side, b.full(side.type, 0.0)))), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 3))
    dh = b(dot_general, g, w1, batch=((), ()), contract=((1,), (1,)))
    dh, zero = b.emit(boundary, dh, b.full(side.type, 0.0), index=0, backward=True)
    dw = b(dot_general, x, b(add, dh, zero), batch=((), ()), contract=((0,), (0,)))
    b.output(dw, "param_grad", "w0")
    program = cut_and_check(b.build(), 2)
    assert edges(program, "gradient") == [(1, 0)]


def test_one_value_may_be_the_gradient_of_two_parameters() -> None:
    b = Builder("two")
    x, p, q = (matrix(b, r, n, 2, 3) for r, n in (("batch", "x"), ("param", "p"), ("param", "q")))
    h = b(add, p, q)
    program = cut_and_check(differentiate(b, total(b, b(mul, h, x)), {"p": p, "q": q}), 1)
    assert names(program, 0, "B", "param_grad") == ["p", "q"]


def test_markers_out_of_order_are_refused() -> None:
    b = Builder("cycle")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)
    (h,) = cut(b, 1, matmul(b, x, w))
    with b.at(Source("model.head", "model.py", 7)):
        (h,) = cut(b, 0, h)
    graph = differentiate(b, total(b, h), {"w": w})
    with pytest.raises(PartitionError, match=r"boundary 0 \(model.head model.py:7\).*from stage 2"):
        partition_stages(graph, 3)


def test_a_marker_without_a_stage_behind_it_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"boundary 1 .*no stage behind it: 2 stages"):
        partition_stages(chain(3), 2)
    with pytest.raises(PartitionError, match="at least one stage"):
        partition_stages(chain(1), 0)


def test_a_marker_inside_a_loop_is_refused() -> None:
    inner = Builder("body")
    c = inner.input(TensorType(f64, (2,)))
    (d,) = cut(inner, 0, c)
    inner.output(d)
    b = Builder("loop")
    x = matrix(b, "batch", "x", 2)
    (y,) = b.emit(scan, x, body=inner.build(), num_consts=0, num_carry=1, length=2, reverse=False)
    b.output(total(b, y), "loss", "")
    with pytest.raises(PartitionError, match="inside scan"):
        partition_stages(b.build(), 2)


def test_an_output_of_the_forward_must_not_depend_on_the_cotangent_of_the_loss() -> None:
    b = Builder("aux")
    x, g = matrix(b, "batch", "x", 2), b.input(TensorType(f64, ()), "loss_grad", "")
    b.output(total(b, x), "loss", "")
    b.output(b(mul, g, g), "aux", "a")
    with pytest.raises(PartitionError, match="aux 'a' depends on the cotangent"):
        partition_stages(b.build(), 1)


def test_effects_of_forward_and_backward_stay_once_each() -> None:
    b = Builder("effects")
    x, w = matrix(b, "batch", "x", 2, 3), matrix(b, "param", "w", 3, 3)

    def log(value: Value, name: str) -> None:
        b.emit(extern, value, target=f"torch:log.{name}", results=(), spec="{}", effect=True)

    log(x, "input")
    (h,) = cut(b, 0, matmul(b, x, w))
    log(h, "hidden")
    b.output(total(b, h), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 3))
    (g,) = b.emit(boundary, g, index=0, backward=True)
    log(g, "gradient")
    b.output(b(dot_general, x, g, batch=((), ()), contract=((0,), (0,))), "param_grad", "w")
    program = verify_program(split_backward(partition_stages(b.build(), 2)))

    def logged(stage: int, kind: TaskKind) -> list[str]:
        return [e.attrs["target"] for e in program.task(stage, kind).eqns if e.op is extern]

    assert logged(0, "F") == ["torch:log.input"]
    assert logged(1, "F") == ["torch:log.hidden"]
    assert logged(0, "I") == ["torch:log.gradient"]
    assert logged(0, "W") == []
