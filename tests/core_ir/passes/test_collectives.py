"""Every pass keeps collectives: none merged, dropped, computed twice or reordered, each start with its wait."""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from joint_programs import (
    cut,
    differentiate,
    matmul,
    matrix,
    over_ranks,
    random_inputs,
    run_joint,
    run_program,
    together,
    total,
)

from plait.core_ir.build import Builder
from plait.core_ir.graph import Eqn, Graph, Value
from plait.core_ir.ops import collective
from plait.core_ir.ops.control import barrier, boundary, scan
from plait.core_ir.ops.elementwise import mul, tanh
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.parse import parse_graph
from plait.core_ir.passes.clean_bodies import clean_bodies
from plait.core_ir.passes.eliminate_dead_code import eliminate_dead_code
from plait.core_ir.passes.equations import nested_graphs
from plait.core_ir.passes.fold_constants import fold_constants
from plait.core_ir.passes.fold_transposes import fold_transposes
from plait.core_ir.passes.merge_common_subexpressions import merge_common_subexpressions
from plait.core_ir.passes.multiplex import multiplex
from plait.core_ir.passes.pipeline import build_program, clean
from plait.core_ir.passes.sort_equations import sort_equations
from plait.core_ir.program import Program
from plait.core_ir.types import TensorType, f64
from plait.core_ir.verify import verify, verify_program

# Cleaning, on text.


def ops(graph: Graph) -> list[str]:
    return [eqn.op.name for eqn in graph.eqns]


def after(one: Callable[[Graph], Graph], *lines: str, outputs: str = "%y: f32[4]") -> Graph:
    body = "\n".join(f"  {line}" for line in lines)
    text = f"plait.ir 1\n\ngraph @g(%x: f32[4], %u: f32[2, 2]) -> ({outputs}) {{\n{body}\n}}\n"
    return verify(one(verify(parse_graph(text))))


SUM = '{axis="data", reduction="sum", size=2}'
TWICE = (
    f"%a: async<f32[4]> = all_reduce(%x) {SUM}",
    f"%b: async<f32[4]> = all_reduce(%x) {SUM}",
    "%p: f32[4] = wait(%a)",
    "%q: f32[4] = wait(%b)",
    "%y: f32[4] = sub(%p, %q)",
)


def test_equal_collectives_stay_apart() -> None:
    graph = after(merge_common_subexpressions, *TWICE)
    assert ops(graph) == ["all_reduce", "all_reduce", "wait", "wait", "sub"]


def test_places_along_an_axis_are_merged() -> None:
    place = '{axis="data", size=2}'
    graph = after(
        merge_common_subexpressions,
        f"%a: i32[] = axis_index() {place}",
        f"%b: i32[] = axis_index() {place}",
        '%c: i32[] = axis_index() {axis="model", size=2}',
        "%d: i32[] = add(%a, %b)",
        "%y: i32[] = add(%c, %d)",
        outputs="%y: i32[]",
    )
    assert ops(graph).count("axis_index") == 2


@pytest.mark.parametrize("one", [eliminate_dead_code, sort_equations], ids=lambda one: one.__name__)
def test_a_collective_that_nothing_reads_stays_with_its_wait(
    one: Callable[[Graph], Graph],
) -> None:
    graph = after(
        one,
        "%n: f32[4] = neg(%x)",
        "%e: f32[4] = exp(%n)",
        f"%a: async<f32[4]> = all_reduce(%n) {SUM}",
        "%p: f32[4] = wait(%a)",
        '%i: i32[] = axis_index() {axis="data", size=2}',
        "%y: f32[4] = sin(%x)",
    )
    assert sorted(ops(graph)) == ["all_reduce", "neg", "sin", "wait"]


def test_collectives_of_constants_are_not_computed() -> None:
    graph = after(
        fold_constants,
        "%c: f32[4] = constant() {value=f32[4]:[1.0, 2.0, 3.0, 4.0]}",
        '%a: async<f32[4]> = all_gather(%c) {axis="data", dim=0, size=1}',
        "%y: f32[4] = wait(%a)",
    )
    assert ops(graph) == ["constant", "all_gather", "wait"]


def test_collectives_keep_their_order_though_the_outputs_ask_for_another() -> None:
    graph = after(
        sort_equations,
        f"%a: async<f32[4]> = all_reduce(%x) {SUM}",
        "%n: f32[4] = neg(%x)",
        '%b: async<f32[4]> = permute(%n) {axis="data", pairs=[[0, 1]], size=2}',
        "%q: f32[4] = wait(%b)",
        "%p: f32[4] = wait(%a)",
        outputs="%q: f32[4], %p: f32[4]",
    )
    assert ops(graph) == ["all_reduce", "neg", "permute", "wait", "wait"]
    assert [eqn.operands[0] for eqn in graph.eqns[3:]] == [
        graph.eqns[2].result,
        graph.eqns[0].result,
    ]


def test_movement_is_folded_on_either_side_of_a_collective() -> None:
    graph = after(
        lambda g: eliminate_dead_code(fold_transposes(g)),
        "%t: f32[2, 2] = transpose(%u) {permutation=[1, 0]}",
        "%t2: f32[2, 2] = transpose(%t) {permutation=[1, 0]}",
        '%a: async<f32[4, 2]> = all_gather(%t2) {axis="data", dim=0, size=2}',
        "%p: f32[4, 2] = wait(%a)",
        "%r: f32[8] = reshape(%p) {shape=[8]}",
        "%y: f32[8, 1] = reshape(%r) {shape=[8, 1]}",
        outputs="%y: f32[8, 1]",
    )
    assert ops(graph) == ["all_gather", "wait", "reshape"]
    assert graph.eqns[0].operands == (graph.inputs[1],)


def test_a_loop_keeps_the_collectives_that_its_results_do_not_need() -> None:
    body = "\n".join(
        (
            "graph @body(%c: f32[4], %d: f32[4]) -> (%n: f32[4], %p: f32[4]) {",
            "  %n: f32[4] = neg(%c)",
            f"  %a: async<f32[4]> = all_reduce(%d) {SUM}",
            "  %p: f32[4] = wait(%a)",
            "}",
        )
    )
    loop = "length=2, num_carry=2, num_consts=0, reverse=false"
    for one in (eliminate_dead_code, clean_bodies, clean):
        graph = after(one, f"%y: f32[4], %z: f32[4] = scan(%x, %x) {{body=\n{body}, {loop}}}")
        (inner,) = nested_graphs(graph.eqns[-1])
        assert ops(inner).count("all_reduce") == ops(inner).count("wait") == 1


# Programs, on all ranks of a mesh.


def communication(graph: Graph) -> Iterator[Eqn]:
    for eqn in graph.eqns:
        if eqn.op in (*collective.STARTS, collective.wait):
            yield eqn
        for inner in nested_graphs(eqn):
            yield from communication(inner)


def counted(*graphs: Graph) -> Counter[str]:
    return Counter(eqn.op.name for graph in graphs for eqn in communication(graph))


def build_and_check(graph: Graph, num_stages: int, mesh: dict[str, int]) -> Program:
    """The program, whose tasks give on all ranks what the joint graph gives, with each collective once."""
    program = verify_program(build_program(verify(graph), num_stages))
    for kinds in (("F", "B"), ("F", "I", "W")):
        tasks = [program.task(s, k) for s in range(num_stages) for k in kinds]  # type: ignore[arg-type]
        assert counted(*tasks) == counted(graph)
    num_ranks = int(np.prod(list(mesh.values())))
    by_rank = [random_inputs(graph, seed) for seed in range(num_ranks)]
    inputs = {port: np.stack([of[port] for of in by_rank]) for port in by_rank[0]}
    run = over_ranks(mesh)
    expected = run_joint(graph, inputs, run)
    for backward in (("B",), ("I", "W")):
        found = run_program(program, inputs, backward, run)
        assert found.keys() == expected.keys()
        for port, array in expected.items():
            np.testing.assert_allclose(found[port], array, rtol=1e-11, err_msg=str(port))
    return program


TP = {"axis": "model", "size": 2}


def tensor_parallel(num_layers: int) -> Graph:
    """tanh(h w1) w2 in each layer, summed over the ranks, as each holds a part of the hidden dim."""
    b = Builder("tp")
    h = matrix(b, "batch", "x", 2, 4)
    params: dict[str, Value] = {}
    for layer in range(num_layers):
        if layer:
            (h,) = cut(b, layer - 1, h)
        up = params[f"{layer}.w1"] = matrix(b, "param", f"{layer}.w1", 4, 3)
        down = params[f"{layer}.w2"] = matrix(b, "param", f"{layer}.w2", 3, 4)
        part = matmul(b, b(tanh, matmul(b, h, up)), down)
        h = together(b, collective.all_reduce, part, reduction="sum", **TP)
    return differentiate(b, total(b, b(tanh, h)), params)


def test_tensor_parallel_layers() -> None:
    program = build_and_check(tensor_parallel(3), 3, {"model": 2})
    for stage in range(3):
        assert counted(program.task(stage, "F"))["all_reduce"] == 1
        assert counted(program.task(stage, "I"))["all_reduce"] == 1
        assert not counted(program.task(stage, "W"))


def sharded_parameters(num_layers: int, again: bool) -> Graph:
    """Each layer gathers its weight, and its backward gathers it once more (`again`); gradients are scattered."""
    b = Builder("fsdp")
    h = matrix(b, "batch", "x", 2, 4)
    data = {"axis": "data", "size": 2}
    shards = [matrix(b, "param", f"{i}.w", 2, 4) for i in range(num_layers)]
    layers = []
    for layer, shard in enumerate(shards):
        if layer:
            (h,) = cut(b, layer - 1, h)
        w = together(b, collective.all_gather, shard, dim=0, **data)
        y = b(tanh, matmul(b, h, w))
        layers.append((h, w, y))
        h = y
    b.output(total(b, h), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), h.type.shape)
    for layer, (x, w, y) in reversed(list(enumerate(layers))):
        g = b(mul, g, b(mul, y, y))
        dw = b(dot_general, x, g, batch=((), ()), contract=((0,), (0,)))
        dw = together(b, collective.reduce_scatter, dw, dim=0, reduction="sum", **data)
        b.output(dw, "param_grad", f"{layer}.w")
        if layer:
            if again:
                w = together(b, collective.all_gather, b(barrier, shards[layer]), dim=0, **data)
            g = b(dot_general, g, w, batch=((), ()), contract=((1,), (1,)))
            (g,) = b.emit(boundary, g, index=layer - 1, backward=True)
    return b.build()


def test_parameters_gathered_again_in_the_backward_are_not_kept() -> None:
    program = build_and_check(sharded_parameters(3, again=True), 3, {"data": 2})
    for stage in range(3):
        parts = {kind: counted(program.task(stage, kind)) for kind in ("F", "I", "W")}  # type: ignore[arg-type]
        assert parts["F"] == {"all_gather": 1, "wait": 1}
        assert parts["I"] == ({"all_gather": 1, "wait": 1} if stage else {})
        assert parts["W"] == {"reduce_scatter": 1, "wait": 1}
        kept = [v.type.shape for _, v in program.task(stage, "F").outputs_of("residual")]
        assert (4, 4) not in kept


def test_parameters_gathered_once_are_kept_for_the_backward() -> None:
    program = build_and_check(sharded_parameters(3, again=False), 3, {"data": 2})
    for stage in (1, 2):
        assert counted(program.task(stage, "I")) == {}
        kept = [v.type.shape for _, v in program.task(stage, "F").outputs_of("residual")]
        assert (4, 4) in kept


def test_two_axes_and_a_joined_forward_and_backward() -> None:
    graph = tensor_parallel(2)
    program = build_and_check(graph, 2, {"data": 2, "model": 2})
    pair = verify(multiplex(program.task(1, "F"), program.task(0, "B")))
    assert counted(pair) == counted(program.task(1, "F"), program.task(0, "B"))


def with_dead_collectives() -> Graph:
    """Collectives that nothing reads: before a cut, behind it, of parameters alone, and of a gradient."""
    b = Builder("dead")
    x, w = matrix(b, "batch", "x", 2, 4), matrix(b, "param", "w", 4, 4)
    together(b, collective.all_reduce, w, reduction="max", **TP)
    h = matmul(b, x, w)
    together(b, collective.permute, h, pairs=((0, 1),), **TP)
    (h,) = cut(b, 0, h)
    together(b, collective.permute, h, pairs=((1, 0),), **TP)
    v = matrix(b, "param", "v", 4, 4)
    loss = total(b, b(tanh, matmul(b, h, v)))
    graph = differentiate(b, loss, {"w": w, "v": v})
    (grad,) = (value for _, value in graph.inputs_of("loss_grad"))
    together(b, collective.all_reduce, grad, reduction="sum", **TP)
    return b.build()


def test_collectives_that_nothing_reads_stand_in_one_task_each() -> None:
    program = build_and_check(with_dead_collectives(), 2, {"model": 2})
    assert counted(program.task(0, "F")) == {"all_reduce": 1, "permute": 1, "wait": 2}
    assert counted(program.task(1, "F")) == {"permute": 1, "wait": 1}
    assert counted(program.task(1, "I")) == {"all_reduce": 1, "wait": 1}


def test_the_result_of_a_wait_crosses_to_the_stage_that_reads_it() -> None:
    b = Builder("cross")
    x, w = matrix(b, "batch", "x", 2, 4), matrix(b, "param", "w", 4, 4)
    h = matmul(b, x, w)
    whole = together(b, collective.all_reduce, h, reduction="sum", **TP)
    (k,) = cut(b, 0, b(tanh, whole))
    loss = total(b, b(mul, k, whole))  # reads `whole` past the cut
    program = build_and_check(differentiate(b, loss, {"w": w}), 2, {"model": 2})
    assert counted(program.task(0, "F"))["wait"] == 1
    assert len(program.edges_from(0, "activation")) == 2


def test_a_loop_of_layers_is_split_with_its_collectives() -> None:
    """dx_i = all_reduce(d w_i^T) stays in the chain of I; dw_i = all_reduce over data of x_i^T d goes to W."""
    body = Builder("body")
    d, x, w = (
        body.input(TensorType(f64, s), name=n)
        for s, n in (((2, 4), "d"), ((2, 4), "x"), ((4, 4), "w"))
    )
    dx = body(dot_general, d, w, batch=((), ()), contract=((1,), (1,)))
    body.output(together(body, collective.all_reduce, dx, reduction="sum", **TP))
    dw = body(dot_general, x, d, batch=((), ()), contract=((0,), (0,)))
    body.output(together(body, collective.all_reduce, dw, reduction="sum", axis="data", size=2))
    b = Builder("loop")
    x0, w0 = matrix(b, "batch", "x", 2, 4), matrix(b, "param", "first", 4, 4)
    xs, ws = matrix(b, "batch", "xs", 3, 2, 4), matrix(b, "param", "rest", 3, 4, 4)
    (h,) = cut(b, 0, matmul(b, x0, w0))
    b.output(total(b, h), "loss", "")
    g = b.expand(b.input(TensorType(f64, ()), "loss_grad", ""), (2, 4))
    loop = dict(num_consts=0, num_carry=1, length=3, reverse=True)
    g, grads = b.emit(scan, g, xs, ws, body=body.build(), **loop)
    b.output(grads, "param_grad", "rest")
    (g,) = b.emit(boundary, g, index=0, backward=True)
    b.output(b(dot_general, x0, g, batch=((), ()), contract=((0,), (0,))), "param_grad", "first")
    program = build_and_check(b.build(), 2, {"data": 2, "model": 2})
    axes = {
        kind: [e.attrs["axis"] for e in communication(program.task(1, kind)) if e.attrs]  # type: ignore[arg-type]
        for kind in ("I", "W")
    }
    assert axes == {"I": ["model"], "W": ["data"]}
