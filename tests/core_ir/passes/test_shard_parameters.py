"""Parameters in shards: what UNSHARD and REDUCE_GRAD give on all ranks at once, against NumPy."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import cases, check
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_arrays import numpy_plan
from stage_programs import inputs_for, layers, meaning
from test_split_backward import gated_mlp

from plait.backends.order import linear_order
from plait.backends.replicas import own_part
from plait.backends.step import Step, add_shared
from plait.core_ir.build import Builder
from plait.core_ir.errors import UsageError, VerifyError
from plait.core_ir.graph import Graph, Port
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh
from plait.core_ir.op import Array
from plait.core_ir.parse import parse_program
from plait.core_ir.passes.pipeline import Passes, build_program
from plait.core_ir.passes.shard_parameters import Sharding, shard_parameters
from plait.core_ir.program import Program, Stage
from plait.core_ir.schedule import build
from plait.core_ir.shards import ShardedStages, shard_rows, shard_type
from plait.core_ir.text import print_program
from plait.core_ir.types import TensorType, bf16, f16, f32, f64, i32
from plait.core_ir.verify import verify_program

SHARDED = Passes(sharding=Sharding("data"))


def sharded_mlp(graph: Graph) -> Program:
    return build_program(
        graph, 1, name="mlp", passes=SHARDED, mesh=Mesh({"stage": 1, "data": 3}, "stage", ("data",))
    )


@pytest.mark.parametrize("path", cases("shard_parameters"), ids=lambda path: path.stem)
def test_golden(path: Path, update_golden: bool) -> None:
    check(path, sharded_mlp, update_golden)


def holding(types: Sequence[TensorType], frozen: Sequence[int] = ()) -> Program:
    """One stage that reads parameters p0, p1, ... and gives each as its gradient, but for frozen ones."""
    f, w = Builder("forward"), Builder("backward_weight")
    for number, type_ in enumerate(types):
        f.input(type_, "param", f"p{number}")
        x = w.input(type_, "param", f"p{number}")
        if number not in frozen:
            w.output(x, "param_grad", f"p{number}")
    return Program(
        "m", (Stage(0, {"F": f.build(), "I": Graph("i", (), (), ()), "W": w.build()}),), ()
    )


def chunks(whole: Array, size: int) -> list[Array]:
    """As torch.chunk cuts dim 0 for `size` ranks, padded with zeros to equal lengths."""
    length = -(-len(whole) // size)
    padded = np.concatenate(
        [whole, np.zeros((length * size - len(whole), *whole.shape[1:]), whole.dtype)]
    )
    return list(padded.reshape(size, length, *whole.shape[1:]))


def run_on_ranks(
    graph: Graph, by_rank: Sequence[dict[str, Array]], size: int
) -> list[dict[str, Array]]:
    """The task's outputs by name, on each rank."""
    operands = [[arrays[port.name] for port in graph.input_ports] for arrays in by_rank]
    outputs = interpret_ranks(graph, operands, {"data": size})
    names = [port.name for port in graph.output_ports]
    return [dict(zip(names, arrays, strict=True)) for arrays in outputs]


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
types = st.builds(TensorType, st.sampled_from([f32, bf16, f16, f64]), shapes)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(types, min_size=1, max_size=6),
    st.integers(2, 4),
    st.sampled_from([0, 100, 2**20]),
    st.sampled_from([None, "f32"]),
    st.integers(0, 2**32 - 1),
)
def test_any_parameters_are_gathered_and_their_gradients_reduced(
    given_types: list[TensorType], size: int, bucket_bytes: int, dtype: str | None, seed: int
) -> None:
    sharding = Sharding("data", bucket_bytes=bucket_bytes, reduce_dtype=dtype)
    program = verify_program(shard_parameters(holding(given_types), sharding, size))
    assert print_program(parse_program(str(program))) == str(program)
    tasks, rng = program.stages[0].tasks, np.random.default_rng(seed)
    # Whole numbers, so that sums are exact in every dtype and order.
    wholes = {
        f"p{n}": rng.integers(-9, 10, t.shape).astype(t.dtype.numpy)
        for n, t in enumerate(given_types)
    }
    cut = {
        name: chunks(x, size) for name, x in wholes.items() if x.ndim and x.size and len(x) >= size
    }
    assert {name: x[0].shape for name, x in cut.items()} == {
        name: type_.shape for name, type_ in program.shard_types.items()
    }
    assert ("UNSHARD" in tasks) == bool(cut)
    if cut:
        own = [{name: parts[rank] for name, parts in cut.items()} for rank in range(size)]
        for gathered in run_on_ranks(tasks["UNSHARD"], own, size):
            assert gathered.keys() == cut.keys()
            for name, x in gathered.items():
                np.testing.assert_array_equal(x, wholes[name])
    reduced = {name: x for name, x in wholes.items() if x.size}
    assert ("REDUCE_GRAD" in tasks) == bool(reduced)
    if reduced:
        by_rank = [
            {name: (x * (rank + 1)).astype(x.dtype) for name, x in reduced.items()}
            for rank in range(size)
        ]
        total = {n: (x * (size * (size + 1) // 2)).astype(x.dtype) for n, x in reduced.items()}
        for rank, found in enumerate(run_on_ranks(tasks["REDUCE_GRAD"], by_rank, size)):
            assert found.keys() == reduced.keys()
            for name, x in found.items():
                wanted = chunks(total[name], size)[rank] if name in cut else total[name]
                np.testing.assert_array_equal(x, wanted)
                assert x.dtype == wanted.dtype


@pytest.mark.parametrize("num_rows", [4, 5, 9, 16])
def test_rows_of_shards_are_all_rows_once(num_rows: int) -> None:
    rows = np.arange(num_rows)
    found = [rows[shard_rows(num_rows, 4, number)] for number in range(4)]
    np.testing.assert_array_equal(np.concatenate(found), rows)
    padded = shard_type(TensorType(f32, (num_rows, 2)), 4)
    assert padded is not None
    assert max(map(len, found)) == padded.shape[0]


def test_what_is_too_small_stays_whole() -> None:
    for shape in ((), (3,), (1, 512), (8, 0)):
        assert shard_type(TensorType(f32, shape), 4) is None
    program = shard_parameters(
        holding([TensorType(f32, (3,)), TensorType(f32, ()), TensorType(f32, (4, 2))]),
        Sharding("data"),
        4,
    )
    assert program.shard_types == {"p2": TensorType(f32, (1, 2))}
    ops = [eqn.op.name for eqn in program.task(0, "REDUCE_GRAD").eqns]
    assert (
        ops.count("all_reduce") == ops.count("reduce_scatter") == 1
    )  # both small ones in one bucket


@pytest.mark.parametrize(
    ("name", "num_stages", "shared"), [("zb-h1", 3, ()), ("zbv", 4, (0, 2, 3))]
)
def test_a_step_in_shards_gives_the_shards_of_the_gradients(
    name: str, num_stages: int, shared: tuple[int, ...]
) -> None:
    """Two replicas, each with its half of all parameters, against the unsharded program on all microbatches."""
    size = 2
    plain = layers([3] * (num_stages + 1), shared=shared, frozen=() if shared else (1,))
    program = verify_program(shard_parameters(plain, Sharding("data"), size))
    assert (program.sharded_stages or ShardedStages((), ())).reduced == tuple(
        s for s in range(num_stages) if shared or s != 1
    )
    inputs = inputs_for(plain, 4 * size)
    schedule = build(name, 2 if name == "zbv" else num_stages, 4)
    mesh = Mesh({"stage": schedule.num_ranks, "data": size}, "stage", ("data",))
    shards = {n: chunks(x, size) for n, x in inputs.params.items()}
    whole: list[dict[str, Array]] = [{} for _ in range(size)]
    for stage in program.stages:
        own = [{n: parts[rank] for n, parts in shards.items()} for rank in range(size)]
        for rank, found in enumerate(run_on_ranks(stage.tasks["UNSHARD"], own, size)):
            whole[rank].update(found)
    partials: list[dict[tuple[int, str], Array]] = []
    for rank in range(size):
        step = Step(numpy_plan(program), own_part(replace(inputs, params=whole[rank]), mesh, rank))
        for action in linear_order(schedule, program):
            step.compute(action)
        partials.append(step.gradients())
    reduced: list[dict[tuple[int, str], Any]] = [{} for _ in range(size)]
    for stage in program.stages:
        if "REDUCE_GRAD" in stage.tasks:
            given_ = [{n: g for (s, n), g in own.items() if s == stage.index} for own in partials]
            for rank, found in enumerate(run_on_ranks(stage.tasks["REDUCE_GRAD"], given_, size)):
                reduced[rank].update({(stage.index, n): g for n, g in found.items()})
    wanted = meaning(plain, inputs)["grads"]
    arrays = numpy_plan(program).arrays
    for rank in range(size):
        grads = add_shared(reduced[rank], arrays)
        assert grads.keys() == wanted.keys()
        for key, grad in grads.items():
            np.testing.assert_allclose(grad, chunks(wanted[key], size)[rank], rtol=1e-5, atol=1e-6)


def test_frozen_parameters_are_sharded_and_reduce_nothing() -> None:
    program = shard_parameters(holding([TensorType(f32, (4,))], frozen=[0]), Sharding("data"), 2)
    assert program.sharded_stages == ShardedStages((0,), ())


def test_collectives_start_before_the_first_wait() -> None:
    types_ = [TensorType(f32, (4, 4)), TensorType(bf16, (4,)), TensorType(f32, (2, 2))]
    program = shard_parameters(holding(types_), Sharding("data", bucket_bytes=0), 2)
    for kind in ("UNSHARD", "REDUCE_GRAD"):
        names = [eqn.op.name for eqn in program.task(0, kind).eqns]
        waits = [at for at, name in enumerate(names) if name == "wait"]
        assert len(waits) == 3
        assert not {"all_gather", "reduce_scatter", "all_reduce"} & set(names[waits[0] :])


def test_gradients_are_summed_in_the_chosen_dtype() -> None:
    """256 and seven ones in bf16, whose steps at 256 are of 2: in f32 263, rounded once; sums in bf16 stay at 256."""
    program = holding([TensorType(bf16, (8,)), TensorType(i32, (8,))])
    wide = shard_parameters(program, Sharding("data", reduce_dtype="f32"), 8).task(0, "REDUCE_GRAD")
    moved = {e.operands[0].type.dtype for e in wide.eqns if e.op.name == "reduce_scatter"}
    assert moved == {f32, i32}  # integers have no other dtype
    ones = np.ones(8, bf16.numpy)
    by_rank = [{"p0": ones * (256 if r == 3 else 1), "p1": np.ones(8, np.int32)} for r in range(8)]
    found = run_on_ranks(wide, by_rank, 8)
    assert [float(each["p0"][0]) for each in found] == [
        264.0
    ] * 8  # 263 lies between 262 and 264: to even
    narrow = shard_parameters(
        holding([TensorType(f32, (2,))]), Sharding("data", reduce_dtype="bf16"), 2
    )
    (eqn,) = [e for e in narrow.task(0, "REDUCE_GRAD").eqns if e.op.name == "reduce_scatter"]
    assert eqn.operands[0].type.dtype == bf16


def test_equal_stages_share_the_equations() -> None:
    program = shard_parameters(layers([4, 4, 4, 4]), Sharding("data"), 2)
    for kind in ("UNSHARD", "REDUCE_GRAD"):
        assert program.task(0, kind).eqns is program.task(2, kind).eqns
        assert program.task(0, kind).input_ports != program.task(2, kind).input_ports


def test_stages_and_parameters_may_be_left_out() -> None:
    plain = layers([4, 4, 4])
    program = shard_parameters(plain, Sharding("data", stages=[1]), 2)
    assert program.sharded_stages == ShardedStages((1,), (1,))
    assert program.stages[0] is plain.stages[0]
    left = shard_parameters(plain, Sharding("data", "after_forward"), 2, whole=["w1"])
    assert left.sharded_stages == ShardedStages((0,), (0,), "after_forward")


def test_one_rank_has_nothing_to_shard() -> None:
    plain = layers([4, 4])
    assert shard_parameters(plain, Sharding("data"), 1) is plain


def test_the_text_says_when_parameters_are_freed() -> None:
    program = shard_parameters(layers([4, 4]), Sharding("data", "after_forward"), 2)
    assert "program @layers {stages=1, reshard=after_forward}" in str(program)
    again = parse_program(str(program))
    assert again.reshard == "after_forward"
    assert again.sharded_stages == program.sharded_stages


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"axis": ""}, "axis must be the name of a mesh axis, got ''"),
        (
            {"axis": "data", "reshard": "never"},
            "reshard must be one of after_backward, after_forward",
        ),
        (
            {"axis": "data", "reduce_dtype": "i32"},
            "reduce_dtype must be one of f16, bf16, .*, got 'i32'",
        ),
        ({"axis": "data", "bucket_bytes": -1}, "bucket_bytes must be a number of bytes, got -1"),
        ({"axis": "data", "stages": ["a"]}, r"stages must be numbers of stages, got \('a',\)"),
    ],
)
def test_wrong_options(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sharding(**given_)


def test_what_cannot_be_sharded() -> None:
    plain = layers([4, 4])
    with pytest.raises(UsageError, match="names stage 1; the program has 1 stages"):
        shard_parameters(plain, Sharding("data", stages=[1]), 2)
    with pytest.raises(UsageError, match="is sharded already"):
        shard_parameters(shard_parameters(plain, Sharding("data"), 2), Sharding("data"), 2)
    graph = gated_mlp(1)
    with pytest.raises(UsageError, match="needs a mesh with that axis"):
        build_program(graph, 1, passes=SHARDED)
    with pytest.raises(UsageError, match=r"these are 'replica'"):
        build_program(
            graph,
            1,
            passes=SHARDED,
            mesh=Mesh({"stage": 1, "data": 2, "replica": 2}, data_axes=("replica",)),
        )


def test_parameters_that_the_axis_cuts_already_are_left_alone() -> None:
    graph = gated_mlp(1)
    names = [port.name for port in graph.input_ports if port.role == "param"]
    program = build_program(
        graph,
        1,
        passes=SHARDED,
        mesh=Mesh({"stage": 1, "data": 2}, data_axes=("data",)),
        layouts={names[0]: (("data",),)},
    )
    assert set(program.shard_types) == set(names[1:])
    assert Port("param_grad", names[0]) not in program.task(0, "REDUCE_GRAD").input_ports


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("UNSHARD", "input_ports", "must read shard ports and give param ports of the same names"),
        ("UNSHARD", "output_ports", "gives param 'other' as .*, the stage reads no such parameter"),
        (
            "REDUCE_GRAD",
            "output_ports",
            "reads the gradient of 'other' as .*, the stage gives no such",
        ),
    ],
)
def test_tasks_that_do_not_fit_are_refused(kind: str, change: str, message: str) -> None:
    program = shard_parameters(layers([4, 4]), Sharding("data"), 2)
    stage = program.stages[0]
    task = stage.tasks[kind]  # type: ignore[index]
    if change == "input_ports":
        task = replace(task, input_ports=(Port("param", "w0"),))
    else:
        task = replace(
            task,
            input_ports=tuple(replace(p, name="other") for p in task.input_ports),
            output_ports=tuple(replace(p, name="other") for p in task.output_ports),
        )
    wrong = replace(program, stages=(Stage(0, {**stage.tasks, kind: task}),))  # type: ignore[dict-item]
    with pytest.raises(VerifyError, match=message):
        verify_program(wrong)
