"""Compile: a task's graph as a function of a list of tensors, by Inductor or as the aten graph itself."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.graph import _BoxedCodeGen

from plait.backends.torch.arrays import to_torch
from plait.backends.torch.emit import Traced, trace
from plait.backends.torch.inductor import Boxed, compile_graph, decompositions
from plait.backends.torch.numerics import full_precision
from plait.core_ir.errors import UnsupportedError, UsageError
from plait.core_ir.graph import Graph
from plait.core_ir.ops.collective import STARTS
from plait.core_ir.passes.structure import graph_digest

CODEGENS = ("inductor", "eager")
MESSAGE_LENGTH = 2000
"""Characters of a compiler's message that are shown; the rest stands in the error's cause."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """Compiled code, shared by all graphs of one structure.

    constants: tensors that `code` takes behind the graph's inputs. seconds: what it took to make.
    """

    code: Boxed
    constants: tuple[Tensor, ...]
    device: torch.device
    seconds: float


@dataclass(frozen=True, eq=False)
class CompiledTask:
    """Runs one graph: takes its inputs as a list, which it clears, and returns its outputs as a list.

    Inputs are contiguous tensors of the inputs' types on the device. Outputs are contiguous, and share storage with no
    input and no other output.
    """

    name: str
    num_inputs: int
    artifact: Artifact

    @property
    def compile_seconds(self) -> float:
        """What it took to make the code (once for all graphs that share it)."""
        return self.artifact.seconds

    @torch.no_grad()
    def __call__(self, arrays: list[Tensor]) -> list[Tensor]:
        if len(arrays) != self.num_inputs:
            raise UsageError(f"task {self.name} takes {self.num_inputs} arrays, got {len(arrays)}")
        arrays.extend(self.artifact.constants)
        with full_precision() if self.artifact.device.type == "cuda" else nullcontext():
            return list(self.artifact.code(arrays))


_ARTIFACTS: WeakValueDictionary[str, Artifact] = WeakValueDictionary()


def compile_task(
    graph: Graph, *, codegen: str = "inductor", device: torch.device | str
) -> CompiledTask:
    """The graph as a callable; graphs of equal structure share one artifact as long as one of them is alive.

    codegen: "inductor" compiles, "eager" runs the aten graph as it is. Raises UnsupportedError, naming the task and the
    op with the user's line, for what torch cannot do.
    """
    if codegen not in CODEGENS:
        raise UsageError(
            f"unknown codegen {codegen!r}; the torch backend has {', '.join(CODEGENS)}"
        )
    device = torch.device(device)
    threads = torch.get_num_threads()  # is compiled in
    key = f"{codegen} {device} {threads} {graph_digest(graph)}"
    artifact = _ARTIFACTS.get(key)
    if artifact is None:
        artifact = _ARTIFACTS[key] = _compile(graph, codegen, device)
    return CompiledTask(graph.name, len(graph.inputs), artifact)


def _compile(graph: Graph, codegen: str, device: torch.device) -> Artifact:
    started = time.perf_counter()
    inductor = codegen == "inductor" and len(graph.eqns) > 0
    try:
        traced = trace(graph, device, decompositions() if inductor else None)
        code = _inductor_code(traced, graph) if inductor else _eager_code(traced)
    except UnsupportedError as error:
        raise UnsupportedError(f"task {graph.name}: {error}") from error
    except Exception as error:
        failed = (
            f'Inductor cannot compile it for {device}; codegen="eager" runs it uncompiled'
            if inductor
            else f"torch cannot run it on {device}"
        )
        raise UnsupportedError(
            f"task {graph.name}: {failed}: {str(error)[:MESSAGE_LENGTH]}"
        ) from error
    constants = tuple(to_torch(c.array, c.type, device) for c in traced.constants)
    return Artifact(code, constants, device, time.perf_counter() - started)


def _inductor_code(traced: Traced, graph: Graph) -> Boxed:
    communicates = any(eqn.op in STARTS for eqn in graph.eqns)
    num_outputs = len(graph.outputs)
    return compile_graph(
        traced.module, num_outputs, traced.fake, traced.mode, in_order=communicates
    )


def _eager_code(traced: Traced) -> Boxed:
    traced.module.graph.set_codegen(_BoxedCodeGen())
    traced.module.recompile()
    code: Callable[[list[Tensor]], Sequence[Tensor]] = traced.module.forward
    return code
