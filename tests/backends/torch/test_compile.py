"""Tasks compiled by Inductor and run as they are: numbers, calling convention, shared artifacts, errors."""

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from op_cases import CASES, OpCase

import plait.backends.torch.compile as compiling
from plait.backends.torch.arrays import to_torch
from plait.backends.torch.compile import compile_task
from plait.backends.torch.numerics import full_precision
from plait.core_ir.arrays import to_numpy
from plait.core_ir.build import Builder
from plait.core_ir.errors import UnsupportedError, UsageError
from plait.core_ir.graph import UNKNOWN, Graph, Source
from plait.core_ir.interpret import interpret
from plait.core_ir.op import Literal
from plait.core_ir.ops import OPS
from plait.core_ir.types import TensorType, f32, i32

CPU = torch.device("cpu")
VEC = TensorType(f32, (4,))
BY_NAME = {case.name: case for case in CASES}


def part(case: OpCase, *numbers: int) -> OpCase:
    """The case with some of its calls only."""
    eqns = tuple(case.graph.eqns[n] for n in numbers)
    inputs = [v for eqn in eqns for v in eqn.operands]
    arrays = dict(zip(case.graph.inputs, case.inputs, strict=True))
    outputs = tuple(v for eqn in eqns for v in eqn.results)
    graph = Graph(case.name, tuple(inputs), eqns, outputs)
    return OpCase(case.name, case.op, graph, tuple(arrays[v] for v in inputs), case.tolerance)


def check_together(cases: Sequence[OpCase], codegen: str) -> None:
    """Compile all cases as one graph, run it, check each case's results."""
    graph = Graph(
        "together",
        tuple(v for c in cases for v in c.graph.inputs),
        tuple(e for c in cases for e in c.graph.eqns),
        tuple(v for c in cases for v in c.graph.outputs),
    )
    task = compile_task(graph, codegen=codegen, device=CPU)
    arrays = [x.copy() for c in cases for x in c.inputs]
    outputs = task([to_torch(x, None, CPU) for x in arrays])
    assert all(x.is_contiguous() for x in outputs)
    given = [x for c in cases for x in c.inputs]
    assert all(x.tobytes() == y.tobytes() for x, y in zip(arrays, given, strict=True)), (
        "an input changed"
    )
    results = iter(outputs)
    for case in cases:
        case.check([to_numpy(next(results)) for _ in case.graph.outputs])


GROUPS: dict[str, dict[str, tuple[int, ...]]] = {
    "elementwise": {
        "exp-float": (0, 3, 4),
        "logistic-float": (0, 2),
        "rsqrt-float": (0,),
        "erf-float": (0, 1),
        "pow-float": (0,),
        "rem-divisor-float": (0,),
        "max-float": (0, 3),
        "max-unsigned": (0, 2, 3),
        "int_div-floor": (2, 7),
        "shift_right_logical-integer": (2, 6, 7),
        "compare-lt": (1, 14),
        "select-all": (0, 9, 15, 17),
        "convert-f32": (1, 7, 8, 10, 13),
        "bitcast-all": (15, 32),
    },
    "movement": {
        "constant-all": (11, 0, 20),
        "iota-all": (1, 4),
        "transpose-all": (0, 3),
        "pad-all": (0, 1, 9),
        "concatenate-all": (0,),
        "dynamic_slice-all": (0, 1),
        "dynamic_update_slice-all": (0, 2),
        "gather-all": (0, 5, 6, 7, 8, 13, 18),
        "scatter-set": (0, 5, 6),
        "scatter-add": (0, 5, 6),
        "scatter-min": (0, 2),
    },
    "reduction": {
        "reduce_sum-float": (0, 3, 6, 10),
        "reduce_max-float": (0, 3, 10),
        "argmax-all": (0, 3, 12),
        "cumsum-float-reverse": (0,),
        "cummax-all-forward": (0,),
        "reduce_window-max": (1, 2),
        "select_and_scatter_add-all": (0, 2),
        "sort-all": (0, 13),
        "top_k-all": (0, 7),
    },
    "linear": {
        "dot_general-float": (0, 3, 5, 9, 10, 14, 18),
        "convolution-all": (1, 5),
        "convolution_input_grad-all": (4,),
        "convolution_weight_grad-all": (4,),
        "grouped_matmul-all": (0,),
        "triangular_solve-all": (1,),
        "attention-grouped": (0,),
        "attention-masked-row": (0,),
        "attention-values": (0,),
        "attention_backward-grouped": (0,),
        "attention_backward-masked-row": (0,),
        "attention_backward-masked-row-grad": (0,),
    },
    "control": {
        "random_bits-all": (4,),
        "fold_in-all": (1,),
        "scan-all": (17,),
        "scan-nested": (0,),
        "cond-all": (0, 6),
        "while-all": (2,),
        "boundary-all": (0,),
        "barrier-all": (0,),
    },
}
"""Calls by case; each group is one Inductor compile."""


@pytest.mark.parametrize("group", GROUPS)
def test_compiled_code_computes_the_numpy_meaning(group: str) -> None:
    check_together([part(BY_NAME[n], *calls) for n, calls in GROUPS[group].items()], "inductor")


def double(name: str = "double", number: float = 2.0, source: Source = UNKNOWN) -> Graph:
    b = Builder(name)
    with b.at(source):
        x = b.input(VEC, "activation", f"{name}.x")
        b.output(b(OPS["mul"], x, b.full(VEC, number)), "activation", f"{name}.y")
    return b.build()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_task_takes_a_list_and_clears_it(codegen: str) -> None:
    task = compile_task(double(), codegen=codegen, device="cpu")
    arrays = [torch.ones(4)]
    (out,) = task(arrays)
    assert arrays == []
    torch.testing.assert_close(out, torch.full((4,), 2.0))
    assert task.compile_seconds > 0


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_inputs_are_freed_after_their_last_use(codegen: str) -> None:
    freed: list[str] = []
    task = compile_task(double(), codegen=codegen, device="cpu")
    arrays = [torch.ones(4)]
    weakref.finalize(arrays[0], freed.append, "x")
    outputs = task(arrays)
    assert freed == ["x"]
    assert len(outputs) == 1


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_outputs_are_contiguous_and_share_no_storage(codegen: str) -> None:
    b = Builder("shared")
    x = b.input(TensorType(f32, (3, 4)))
    doubled = b(OPS["add"], x, x)
    table = b(OPS["constant"], value=Literal(np.arange(20, dtype=np.float32)))
    for value in (
        x,
        x,
        b.transpose(x, (1, 0)),
        doubled,
        doubled,
        b.transpose(doubled, (1, 0)),
        table,
    ):
        b.output(value)
    source = torch.randn(3, 4)
    task = compile_task(b.build(), codegen=codegen, device="cpu")
    first, second = task([source]), task([source])
    pointers = [y.untyped_storage().data_ptr() for y in (source, *first, *second)]
    assert len(set(pointers)) == len(pointers)
    assert all(y.is_contiguous() for y in first)
    torch.testing.assert_close(first[5], 2 * source.T)
    first[6].zero_()  # the caller's own
    torch.testing.assert_close(task([source])[6], torch.arange(20.0))


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_writing_into_a_broadcast_writes_each_element_once(codegen: str) -> None:
    # What an embedding's gradient does: zeros of one number, added into at rows.
    matrix = TensorType(f32, (6, 4))
    row = dict(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
        operand_batching_dims=(),
        scatter_indices_batching_dims=(),
        mode="drop",
    )
    b = Builder("write")
    rows, updates = b.input(TensorType(i32, (3, 1))), b.input(TensorType(f32, (3, 4)))
    start = b.literal(1, i32)
    for kind in ("add", "set", "max"):
        b.output(b(OPS["scatter"], b.full(matrix, 0.0), rows, updates, kind=kind, **row))
    one = b(OPS["slice"], rows, start=(0, 0), limit=(1, 1), strides=(1, 1))
    first = b(OPS["slice"], updates, start=(0, 0), limit=(1, 4), strides=(1, 1))
    b.output(b(OPS["scatter"], b.full(matrix, 0.0), one, first, kind="set", **row))
    b.output(b(OPS["dynamic_update_slice"], b.full(matrix, 0.0), updates, start, b.literal(0, i32)))
    graph = b.build()
    inputs = [np.array([[5], [0], [5]], np.int32), np.arange(12, dtype=np.float32).reshape(3, 4)]
    outputs = compile_task(graph, codegen=codegen, device="cpu")(
        [to_torch(x, None, CPU) for x in inputs]
    )
    for got, want in zip(outputs, interpret(graph, inputs), strict=True):
        assert got.is_contiguous()
        np.testing.assert_array_equal(to_numpy(got), want)


def test_same_code_gives_the_same_bits() -> None:
    case = part(BY_NAME["reduce_sum-float"], 0)
    task = compile_task(case.graph, device="cpu")
    runs = [task([to_torch(x, None, CPU) for x in case.inputs])[0] for _ in range(3)]
    assert all(torch.equal(runs[0], other) for other in runs)


# Shared artifacts.


def test_graphs_of_equal_structure_share_one_artifact_whatever_their_names() -> None:
    first = compile_task(double("stage0.F"), codegen="eager", device="cpu")
    second = compile_task(
        double("stage1.F", source=Source("m", "f.py", 3)), codegen="eager", device="cpu"
    )
    assert first.artifact is second.artifact
    assert (first.name, second.name) == ("stage0.F", "stage1.F")


def test_another_constant_or_codegen_is_another_artifact() -> None:
    tasks = [
        compile_task(double(number=n), codegen=codegen, device="cpu")
        for n in (2.0, 3.0)
        for codegen in ("eager", "inductor")
    ]
    assert len({id(t.artifact) for t in tasks}) == 4
    for task, expected in zip(tasks, (2, 2, 3, 3), strict=True):
        assert task([torch.ones(4)])[0].tolist() == [expected] * 4


def test_artifact_lives_as_long_as_a_task_holds_it() -> None:
    task = compile_task(double(number=17.0), codegen="eager", device="cpu")
    gone = weakref.ref(task.artifact)
    del task
    gc.collect()
    assert gone() is None


# Edges and errors.


def test_graph_without_equations_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_graph", None)
    b = Builder("through")
    b.output(b.input(VEC))
    x = torch.randn(4)
    (y,) = compile_task(b.build(), device="cpu")([x])
    assert torch.equal(x, y)
    assert x.data_ptr() != y.data_ptr()
    assert compile_task(Builder("nothing").build(), device="cpu")([]) == []


def test_wrong_number_of_arrays_and_unknown_codegen_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="double takes 1 arrays, got 2"):
        compile_task(double(), codegen="eager", device="cpu")([torch.ones(4), torch.ones(4)])
    with pytest.raises(UsageError, match=r"'triton'.*inductor, eager"):
        compile_task(double(), codegen="triton", device="cpu")


def test_op_that_torch_cannot_compute_is_named_with_task_and_line() -> None:
    b = Builder("stage2.F")
    with b.at(Source("model.head", "model.py", 9)):
        x = b.input(VEC)
        b.output(b(OPS["extern"], x, target="jax:foo", results=(VEC,), spec="{}"))
    with pytest.raises(UnsupportedError, match=r"task stage2\.F: model\.head model\.py:9.*foo"):
        compile_task(b.build(), device="cpu")


def test_failure_of_inductor_names_the_task_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(compiling, "compile_graph", fail)
    with pytest.raises(UnsupportedError, match=r'double.*codegen="eager".*no kernel for this'):
        compile_task(double(number=5.0), device="cpu")


def test_failure_of_eager_code_does_not_send_to_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(compiling, "trace", fail)
    with pytest.raises(UnsupportedError, match="torch cannot run it on cpu: no kernel for this"):
        compile_task(double(number=6.0), codegen="eager", device="cpu")


def test_full_precision_is_on_inside_and_put_back_after() -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv

    def flags() -> tuple[object, ...]:
        return (
            conv.fp32_precision,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
        )

    before = flags()
    inside: list[tuple[object, ...]] = []
    with pytest.raises(KeyError), full_precision():
        raise KeyError(inside.append(flags()))
    assert inside == [("ieee", False, False)]
    assert flags() == before != ("ieee", False, False)
