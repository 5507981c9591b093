"""A program: the stages a model was cut into, the task graphs of each, and the edges between stages.

The tasks of a stage are graphs over one namespace of ports: two ports of equal role and name, in any two tasks of one
stage, are the same value. So a task reads `param`, `buffer`, `batch`, `rng_key` and `loss_grad` ports from the runtime,
`activation` and `gradient` ports from edges, and every other port (`residual`, `handover`, or an activation that F
read or made) from what an earlier task of the same stage and microbatch read or wrote.

Where parameters are sharded, two tasks run once a step, not once a microbatch: UNSHARD gives the whole `param`s that
the others read, from this rank's `shard`s; REDUCE_GRAD reads a stage's `param_grad`s, summed over microbatches, and
gives their sums over ranks, as `shard_grad`s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from plait.core_ir.errors import VerifyError
from plait.core_ir.graph import Graph, Port
from plait.core_ir.shards import Reshard, ShardedStages
from plait.core_ir.text import print_program
from plait.core_ir.types import TensorType

TaskKind: TypeAlias = Literal["F", "B", "I", "W", "UNSHARD", "REDUCE_GRAD"]
EdgeKind: TypeAlias = Literal["activation", "gradient"]

TASK_KINDS: tuple[TaskKind, ...] = ("F", "B", "I", "W")
"""The tasks of a microbatch."""
STEP_KINDS: tuple[TaskKind, ...] = ("UNSHARD", "REDUCE_GRAD")
"""The tasks that run once a step."""
PAIR = "F&B"
"""What the task of a pair is called."""


@dataclass(frozen=True)
class Edge:
    """A value that crosses from one stage to another, once for each microbatch.

    `output` is a port of the source stage's F (activation) or I and B (gradient); `input` is a port of the target
    stage's F (activation) or of its I, W and B (gradient). `num_bytes` is for one microbatch.
    """

    source: int
    output: Port
    target: int
    input: Port
    kind: EdgeKind
    num_bytes: int

    def __str__(self) -> str:
        return f"stage {self.source} {self.output} -> stage {self.target} {self.input}, {self.num_bytes} bytes"


@dataclass(frozen=True)
class Stage:
    """One stage: its number and its task graphs.

    F always stands; B is the whole backward, I and W its two parts (absent until the backward is split). A stage whose
    F nothing differentiates has empty graphs: legal no-ops. UNSHARD and REDUCE_GRAD are there where they have
    something to do.
    """

    index: int
    tasks: Mapping[TaskKind, Graph]

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters any task of this stage reads or gives a gradient of, in order of first use."""
        names: dict[str, None] = {}
        for graph in self.tasks.values():
            names.update((name, None) for name, _ in graph.inputs_of("param"))
            names.update((name, None) for name, _ in graph.outputs_of("param_grad"))
        return tuple(names)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers any task of this stage reads or F updates."""
        names: dict[str, None] = {}
        for graph in self.tasks.values():
            names.update((name, None) for name, _ in graph.inputs_of("buffer"))
            names.update((name, None) for name, _ in graph.outputs_of("buffer_update"))
        return tuple(names)

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """Names of the batch leaves any task of this stage reads."""
        names: dict[str, None] = {}
        for graph in self.tasks.values():
            names.update((name, None) for name, _ in graph.inputs_of("batch"))
        return tuple(names)

    @property
    def updates_buffers(self) -> bool:
        """Whether F changes a buffer, so that the stage's Fs must run in microbatch order."""
        return any(True for _ in self.tasks["F"].outputs_of("buffer_update"))


@dataclass(frozen=True)
class Program:
    """Stages in order, the edges between them, and notes for the user (a stage is empty, a cut is wide, ...).

    `pairs[f, b]` is the task F&B of a schedule that overlaps: stage f's F with stage b's B in one graph, whose inputs
    and outputs are those of B, then those of F. `reshard` says when gathered parameters are freed, where any are.
    """

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    pairs: Mapping[tuple[int, int], Graph] = field(default_factory=dict)
    reshard: Reshard = "after_backward"

    def __post_init__(self) -> None:
        for position, stage in enumerate(self.stages):
            if stage.index != position:
                raise VerifyError(f"program {self.name}: stage {stage.index} stands at {position}")

    def __str__(self) -> str:
        """The text form; `parse_program` reads it back."""
        return print_program(self)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def task(self, stage: int, kind: TaskKind) -> Graph:
        """The graph of one task."""
        return self.stages[stage].tasks[kind]

    @cached_property
    def shared_params(self) -> dict[str, tuple[int, ...]]:
        """Parameters that two or more stages use, with these stages in order."""
        users: dict[str, list[int]] = {}
        for stage in self.stages:
            for name in stage.params:
                users.setdefault(name, []).append(stage.index)
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}

    @cached_property
    def param_types(self) -> dict[str, TensorType]:
        """Type of each parameter that a task reads or gives a gradient of."""
        types: dict[str, TensorType] = {}
        for stage in self.stages:
            for graph in stage.tasks.values():
                types.update((n, v.type) for n, v in graph.outputs_of("param_grad"))
        for stage in self.stages:
            for graph in stage.tasks.values():
                types.update((n, v.type) for n, v in graph.inputs_of("param"))
        return types

    @cached_property
    def buffer_types(self) -> dict[str, TensorType]:
        """Type of each buffer that a task reads or changes."""
        return {
            name: value.type
            for stage in self.stages
            for graph in stage.tasks.values()
            for name, value in (*graph.outputs_of("buffer_update"), *graph.inputs_of("buffer"))
        }

    @cached_property
    def shard_types(self) -> dict[str, TensorType]:
        """Type of the shard, padded, of each parameter that is sharded; by name."""
        types = {
            name: value.type
            for stage in self.stages
            if "REDUCE_GRAD" in stage.tasks
            for name, value in stage.tasks["REDUCE_GRAD"].outputs_of("shard_grad")
            if value.type != self.param_types[name]
        }
        for stage in self.stages:
            if "UNSHARD" in stage.tasks:
                types.update((n, v.type) for n, v in stage.tasks["UNSHARD"].inputs_of("shard"))
        return types

    @cached_property
    def shard_axis(self) -> tuple[str, int] | None:
        """The axis over which parameters are sharded, and the ranks along it; None where none are."""
        for stage in self.stages:
            for kind in STEP_KINDS:
                for eqn in stage.tasks[kind].eqns if kind in stage.tasks else ():
                    if "axis" in eqn.attrs:
                        return eqn.attrs["axis"], eqn.attrs["size"]
        return None

    @cached_property
    def reduced_params(self) -> frozenset[str]:
        """The parameters whose gradients are reduced along the axis of the shards: sharded or too small to be."""
        return frozenset(
            name
            for stage in self.stages
            if "REDUCE_GRAD" in stage.tasks
            for name, _ in stage.tasks["REDUCE_GRAD"].outputs_of("shard_grad")
        )

    @cached_property
    def sharded_stages(self) -> ShardedStages | None:
        """What `lower` asks for; None where no stage is sharded."""
        gathered, reduced = (
            tuple(stage.index for stage in self.stages if kind in stage.tasks)
            for kind in STEP_KINDS
        )
        return ShardedStages(gathered, reduced, self.reshard) if gathered or reduced else None

    def edge_kinds(self) -> tuple[tuple[int, int, EdgeKind], ...]:
        """`(source, target, kind)` of every pair of stages with a message, each once: what `lower` asks for."""
        return tuple(dict.fromkeys((e.source, e.target, e.kind) for e in self.edges))

    def edges_from(self, stage: int, kind: EdgeKind) -> tuple[Edge, ...]:
        """Edges of one kind that leave a stage."""
        return self._edges_by_source.get((stage, kind), ())

    def edges_into(self, stage: int, kind: EdgeKind) -> tuple[Edge, ...]:
        """Edges of one kind that enter a stage."""
        return self._edges_by_target.get((stage, kind), ())

    @cached_property
    def _edges_by_source(self) -> dict[tuple[int, EdgeKind], tuple[Edge, ...]]:
        return _group((e.source, e.kind, e) for e in self.edges)

    @cached_property
    def _edges_by_target(self) -> dict[tuple[int, EdgeKind], tuple[Edge, ...]]:
        return _group((e.target, e.kind, e) for e in self.edges)


def _group(
    items: Iterable[tuple[int, EdgeKind, Edge]],
) -> dict[tuple[int, EdgeKind], tuple[Edge, ...]]:
    groups: dict[tuple[int, EdgeKind], list[Edge]] = {}
    for stage, kind, edge in items:
        groups.setdefault((stage, kind), []).append(edge)
    return {key: tuple(edges) for key, edges in groups.items()}
