"""Shard parameters over an axis of the mesh: gathered before a stage uses them, gradients reduced to shards behind it.

    task 1 F graph @m.stage1.forward(%w: f32[4, 8] {param "w"}, ...) ...
    task 1 W graph @m.stage1.backward_weight(...) -> (%dw: f32[4, 8] {param_grad "w"}) ...
    ->
    task 1 F, task 1 W as before, and
    task 1 UNSHARD graph @m.stage1.unshard(%s: f32[2, 8] {shard "w"}) -> (%w: f32[4, 8] {param "w"}) {
      %h: async<f32[4, 8]> = all_gather(%s) {axis="data", dim=0, size=2}
      %w: f32[4, 8] = wait(%h)
    }
    task 1 REDUCE_GRAD graph @m.stage1.reduce_grad(%g: f32[4, 8] {param_grad "w"})
        -> (%r: f32[2, 8] {shard_grad "w"}) {
      %h: async<f32[2, 8]> = reduce_scatter(%g) {axis="data", dim=0, reduction="sum", size=2}
      %r: f32[2, 8] = wait(%h)
    }

As in ZeRO (Rajbhandari et al., arXiv 1910.02054) and FSDP (Zhao et al., arXiv 2304.11277): each rank along the axis
holds a part of each parameter, of its gradient and of its optimizer state.

Shards are rows (`core_ir.shards`), as those of `torch.distributed.fsdp.fully_shard`, and not chunks of one flat array:
so a shard keeps its parameter's name and number of dims, by which optimizers choose weight decay and update rules;
state that was saved by rank is joined along dim 0 without knowing more; and elementwise optimizers and the norm
of gradients are right on shards as they are. What stays whole, a parameter with fewer rows than ranks, has its gradient
summed over all ranks; so every rank changes it alike.

Small arrays of one dtype go together in one collective, `Sharding.bucket_bytes` at most. All collectives of a graph
start before the first wait: an engine can run up to there, and go on when the results are asked for. A frozen
parameter is sharded, and has no gradient to reduce.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from plait.core_ir.build import Builder
from plait.core_ir.errors import UsageError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.ops.collective import all_gather, all_reduce, reduce_scatter, wait
from plait.core_ir.ops.shape import concatenate, pad, slice_
from plait.core_ir.program import STEP_KINDS, Program, Stage
from plait.core_ir.shards import Reshard, shard_type
from plait.core_ir.types import DTYPES, DType, TensorType


@dataclass(frozen=True)
class Sharding:
    """How parameters are sharded.

    axis: of the mesh, a data axis: its ranks run the same stages on different parts of each microbatch.
    reshard: when gathered parameters are freed. "after_backward": once a stage has run its last backward; it is
        gathered once a step. "after_forward": also between its forwards and its first backward, where its rank runs
        other stages meanwhile; it is gathered twice then.
    reduce_dtype: of floats while gradients are summed over ranks, "f32" say; default their own. Results are converted
        back: a gradient has the dtype of its parameter.
    bucket_bytes: how much goes into one collective, unless a single parameter is larger; the default is that of
        torch's DistributedDataParallel.
    stages: whose parameters are sharded; default all.
    """

    axis: str
    reshard: Reshard = "after_backward"
    reduce_dtype: str | None = None
    bucket_bytes: int = 25 * 2**20
    stages: Collection[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str) or not self.axis:
            raise UsageError(f"Sharding.axis must be the name of a mesh axis, got {self.axis!r}")
        if self.reshard not in get_args(Reshard):
            raise UsageError(
                f"Sharding.reshard must be one of {', '.join(get_args(Reshard))}, got {self.reshard!r}"
            )
        floats = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
        if self.reduce_dtype is not None and self.reduce_dtype not in floats:
            raise UsageError(
                f"Sharding.reduce_dtype must be one of {', '.join(floats)}, or None, got {self.reduce_dtype!r}"
            )
        if not _is_int(self.bucket_bytes) or self.bucket_bytes < 0:
            raise UsageError(
                f"Sharding.bucket_bytes must be a number of bytes, got {self.bucket_bytes!r}"
            )
        if self.stages is not None:
            stages = tuple(self.stages)
            if not all(_is_int(stage) and stage >= 0 for stage in stages):
                raise UsageError(f"Sharding.stages must be numbers of stages, got {stages!r}")
            object.__setattr__(self, "stages", stages)


def shard_parameters(
    program: Program, sharding: Sharding, size: int, whole: Collection[str] = ()
) -> Program:
    """The program with tasks UNSHARD and REDUCE_GRAD for its sharded stages; all other tasks stay as they are.

    size: ranks along the axis; with one the program stays as it is. whole: names of parameters that are left alone,
    gradients too: those that the axis cuts already. So are those that a stage which is not sharded has too.

    Raises UsageError for stages that the program does not have, and for a program that is sharded already.
    """
    if program.sharded_stages is not None:
        raise UsageError(f"program {program.name} is sharded already; shard_parameters runs once")
    stages = range(program.num_stages) if sharding.stages is None else sharding.stages
    unknown = sorted(set(stages) - set(range(program.num_stages)))
    if unknown:
        raise UsageError(
            f"Sharding.stages names stage {unknown[0]}; the program has {program.num_stages} stages, from 0 on"
        )
    if size == 1:
        return program
    others = {s.index for s in program.stages} - set(stages)
    whole = {*whole, *(n for n, users in program.shared_params.items() if others & set(users))}
    made: dict[tuple[str, tuple[TensorType, ...]], Graph] = {}

    def task(stage: Stage, kind: str, types: dict[str, TensorType]) -> Graph:
        """Stages with equal parameters share the equations."""
        key = (kind, tuple(types.values()))
        if key not in made:
            build = _unshard if kind == "unshard" else _reduce_grad
            made[key] = build(key[1], sharding, size)
        return _named(made[key], f"{program.name}.stage{stage.index}.{kind}", list(types))

    def sharded(stage: Stage) -> Stage:
        graphs = [graph for kind, graph in stage.tasks.items() if kind not in STEP_KINDS]
        read = {n: v.type for graph in graphs for n, v in graph.inputs_of("param")}
        given = {n: v.type for graph in graphs for n, v in graph.outputs_of("param_grad")}
        gathered = {n: t for n, t in read.items() if n not in whole and shard_type(t, size)}
        reduced = {n: t for n, t in given.items() if n not in whole and t.size}
        tasks = dict(stage.tasks)
        if gathered:
            tasks["UNSHARD"] = task(stage, "unshard", gathered)
        if reduced:
            tasks["REDUCE_GRAD"] = task(stage, "reduce_grad", reduced)
        return Stage(stage.index, tasks)

    return replace(
        program,
        stages=tuple(sharded(s) if s.index in stages else s for s in program.stages),
        reshard=sharding.reshard,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(graph: Graph, name: str, params: Sequence[str]) -> Graph:
    """The graph for parameters of these names, in order."""
    return replace(
        graph,
        name=name,
        input_ports=tuple(
            replace(p, name=n) for p, n in zip(graph.input_ports, params, strict=True)
        ),
        output_ports=tuple(
            replace(p, name=n) for p, n in zip(graph.output_ports, params, strict=True)
        ),
    )


class _Array(NamedTuple):
    """An array that goes into a collective: the number of its parameter, and the type of what comes out for it."""

    number: int
    value: Value
    result: TensorType


def _unshard(types: Sequence[TensorType], sharding: Sharding, size: int) -> Graph:
    """Shards of all ranks -> whole parameters."""
    b = Builder("unshard")
    arrays = []
    for number, whole in enumerate(types):
        shard = shard_type(whole, size)
        assert shard is not None, whole
        padded = shard.with_shape((size * shard.shape[0], *shard.shape[1:]))
        arrays.append(_Array(number, b.input(shard, "shard", str(number)), padded))
    started = [
        (bucket, b(all_gather, _joined(b, bucket, 1), axis=sharding.axis, size=size, dim=0))
        for bucket in _buckets(arrays, sharding.bucket_bytes)
    ]
    found = _waited(b, started)
    for number, whole in enumerate(types):
        b.output(_rows(b, found[number], whole.shape[0]), "param", str(number))
    return b.build()


def _reduce_grad(types: Sequence[TensorType], sharding: Sharding, size: int) -> Graph:
    """Whole gradients -> their sums over ranks: of this rank's rows, of the whole where there are no shards."""
    b = Builder("reduce_grad")
    inputs = [b.input(whole, "param_grad", str(number)) for number, whole in enumerate(types)]
    cut, kept = [], []
    for number, grad in enumerate(inputs):
        is_float = grad.type.dtype.kind == "float"
        dtype = DTYPES[sharding.reduce_dtype] if sharding.reduce_dtype and is_float else None
        value = b.convert(grad, dtype or grad.type.dtype)
        shard = shard_type(value.type, size)
        if shard is None:
            kept.append(_Array(number, value, value.type))
        else:
            cut.append(_Array(number, _padded(b, value, size * shard.shape[0]), shard))
    axis: dict[str, Any] = {"axis": sharding.axis, "size": size, "reduction": "sum"}
    started = [
        (bucket, b(reduce_scatter, _joined(b, bucket, size), dim=0, **axis))
        for bucket in _buckets(cut, sharding.bucket_bytes)
    ]
    started += [
        (bucket, b(all_reduce, _joined(b, bucket, 1), **axis))
        for bucket in _buckets(kept, sharding.bucket_bytes)
    ]
    found = _waited(b, started)
    for number, whole in enumerate(types):
        b.output(b.convert(found[number], whole.dtype), "shard_grad", str(number))
    return b.build()


def _buckets(arrays: Sequence[_Array], limit: int) -> list[list[_Array]]:
    """Arrays of one dtype, in order, as many as the limit lets into one collective."""
    buckets: list[list[_Array]] = []
    filling: dict[DType, tuple[list[_Array], int]] = {}
    for array in arrays:
        dtype = array.value.type.dtype
        num_bytes = max(array.value.type.num_bytes, array.result.num_bytes)
        bucket, held = filling.get(dtype, ([], 0))
        if not bucket or held + num_bytes > limit:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(array)
        filling[dtype] = bucket, held + num_bytes
    return buckets


def _joined(b: Builder, bucket: Sequence[_Array], num_rows: int) -> Value:
    """The arrays of a bucket as the columns of one, whose rows go to, or come from, the ranks."""
    if len(bucket) == 1:
        return bucket[0].value
    flat = [b.reshape(a.value, (num_rows, a.value.type.size // num_rows)) for a in bucket]
    return b(concatenate, *flat, dim=1)


def _waited(b: Builder, started: Sequence[tuple[Sequence[_Array], Value]]) -> dict[int, Value]:
    """What came out of the collectives, by number: each waited for, and its bucket taken apart."""
    found: dict[int, Value] = {}
    for bucket, handle in started:
        joined = b(wait, handle)
        if len(bucket) == 1:
            found[bucket[0].number] = joined
            continue
        num_rows, first = joined.type.shape[0], 0
        for array in bucket:
            last = first + array.result.size // num_rows
            columns = b(slice_, joined, start=(0, first), limit=(num_rows, last), strides=(1, 1))
            found[array.number] = b.reshape(columns, array.result.shape)
            first = last
    return found


def _padded(b: Builder, x: Value, num_rows: int) -> Value:
    """x with rows of zeros behind."""
    missing, zeros = num_rows - x.type.shape[0], (0,) * x.type.rank
    if not missing:
        return x
    zero = b.literal(0, x.type.dtype)
    return b(pad, x, zero, low=zeros, high=(missing, *zeros[1:]), interior=zeros)


def _rows(b: Builder, x: Value, num_rows: int) -> Value:
    """The first rows of x."""
    if x.type.shape[0] == num_rows:
        return x
    rank, rest = x.type.rank, x.type.shape[1:]
    return b(slice_, x, start=(0,) * rank, limit=(num_rows, *rest), strides=(1,) * rank)
