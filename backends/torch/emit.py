"""Emit: a graph as a torch.fx graph of aten ops, in the IR's strict semantics.

The emitters are functions of tensors; tracing them over fake tensors on the device gives the graph. Values are held in
carriers (carriers.py); ports keep the dtypes of their types. The table below is the whole of what the backend runs.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta, set_stack_trace

from plait.backends.torch import (
    emit_attention,
    emit_collective,
    emit_control,
    emit_convert,
    emit_convolution,
    emit_elementwise,
    emit_extern,
    emit_index,
    emit_integer,
    emit_linalg,
    emit_random,
    emit_reduce,
    emit_shape,
    emit_window,
)
from plait.backends.torch.arrays import to_torch, torch_dtype
from plait.backends.torch.carriers import carrier, enter, leave
from plait.backends.torch.constants import constants_of
from plait.backends.torch.emitter import Call, Emitter, Scope
from plait.backends.torch.storage import separate
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Graph, Value
from plait.core_ir.op import Literal, Op
from plait.core_ir.ops.collective import wait
from plait.core_ir.ops.shape import constant
from plait.core_ir.types import AsyncType, TensorType

FAMILIES = (
    *(emit_elementwise, emit_integer, emit_convert, emit_shape, emit_reduce, emit_window),
    *(
        emit_index,
        emit_linalg,
        emit_convolution,
        emit_attention,
        emit_random,
        emit_control,
        emit_collective,
        emit_extern,
    ),
)

EMITTERS: dict[Op, Emitter] = {op: e for family in FAMILIES for op, e in family.EMITTERS.items()}


@dataclass(frozen=True)
class Traced:
    """A graph of aten ops: inputs are those of the IR's graph, then `constants`; outputs a tuple.

    fake: the fake tensors it was traced with, of one mode, for a compiler that wants examples.
    """

    module: GraphModule
    constants: tuple[Literal, ...]
    fake: tuple[Tensor, ...]
    mode: FakeTensorMode


def emit(graph: Graph, device: torch.device | str) -> GraphModule:
    """The module that computes a graph: called with its inputs in order, it returns a tuple of its outputs.

    Every output is row-major contiguous, and shares storage with no input and no other output. Raises UnsupportedError,
    naming the op and the user's line, for what torch cannot do.
    """
    traced = trace(graph, device)
    module = traced.module
    places = [n for n in module.graph.nodes if n.op == "placeholder"][len(graph.inputs) :]
    for place, literal in zip(places, traced.constants, strict=True):
        name = f"constant_{literal.digest}"
        module.register_buffer(name, to_torch(literal.array, literal.type, torch.device(device)))
        with module.graph.inserting_before(place):
            place.replace_all_uses_with(module.graph.get_attr(name))
        module.graph.erase_node(place)
    module.recompile()
    return module


def trace(
    graph: Graph,
    device: torch.device | str,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Traced:
    """As `emit`, with the constants that need tensors as further inputs; nothing is put on the device."""
    device = torch.device(device)
    constants = tuple(constants_of(graph))
    digests = [c.digest for c in constants]
    types = [*graph.input_types, *(c.type for c in constants)]
    num = len(graph.inputs)

    def compute(*ports: Tensor) -> tuple[Tensor, ...]:
        held = [enter(x, t.dtype) for x, t in zip(ports, types, strict=True)]
        scope = Scope(device, dict(zip(digests, held[num:], strict=True)), _run)
        outputs = _run(graph, held[:num], scope)
        return tuple(_left(outputs, graph.output_types, ports))

    # Without a ShapeEnv Inductor does not use its cache.
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad(), mode, preserve_node_meta():
        fake = tuple(torch.empty(t.shape, dtype=torch_dtype(t.dtype), device=device) for t in types)
        module = make_fx(compute, decomposition_table=dict(decompositions or {}))(*fake)
    module.graph.eliminate_dead_code()
    module.recompile()
    return Traced(module, constants, fake, mode)


def _left(
    outputs: Sequence[Tensor], types: Sequence[TensorType], ports: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs as ports. What is still under way must not be touched, and no other value shares its storage."""
    there = [(x, t) for x, t in zip(outputs, types, strict=True) if not isinstance(t, AsyncType)]
    separated = iter(separate([leave(x, t.dtype) for x, t in there], ports))
    return [
        x.view(t.shape) if isinstance(t, AsyncType) else next(separated)
        for x, t in zip(outputs, types, strict=True)
    ]


def begin(
    graph: Graph, operands: Sequence[Tensor], device: torch.device
) -> Callable[[], list[Tensor]]:
    """Run a graph equation by equation, as it is, up to its first wait; what is given runs the rest, and gives its
    outputs, contiguous tensors each with a storage of its own.

    For graphs that move and communicate, which no compiler makes faster, and whose collectives run meanwhile.
    """
    digests = [c.digest for c in constants_of(graph)]
    tensors = [enter(to_torch(c.array, c.type, device), c.type.dtype) for c in constants_of(graph)]
    held = [enter(x, t.dtype) for x, t in zip(operands, graph.input_types, strict=True)]
    rest = _pausing(graph, held, Scope(device, dict(zip(digests, tensors, strict=True)), _run))
    done = _until_wait(rest)

    def end() -> list[Tensor]:
        return _left(_to_the_end(rest) if done is None else done, graph.output_types, operands)

    return end


_Pausing: TypeAlias = Generator[None, None, list[Tensor]]


def _until_wait(run: _Pausing) -> list[Tensor] | None:
    """Goes on; None where there is more to come."""
    try:
        next(run)
    except StopIteration as ended:
        return cast("list[Tensor]", ended.value)
    return None


def _to_the_end(run: _Pausing) -> list[Tensor]:
    outputs = None
    while outputs is None:
        outputs = _until_wait(run)
    return outputs


def _run(graph: Graph, operands: Sequence[Tensor], scope: Scope) -> list[Tensor]:
    return _to_the_end(_pausing(graph, operands, scope))


def _pausing(graph: Graph, operands: Sequence[Tensor], scope: Scope) -> _Pausing:
    """Emits one equation after the other, and stops before each wait."""
    known: dict[Value, Tensor] = dict(zip(graph.inputs, operands, strict=True))
    literals: dict[Value, Literal] = {}
    started: dict[Value, Call] = {}
    for eqn in graph.eqns:
        if eqn.op is wait:
            yield
        if eqn.op is constant and eqn.result.type.rank == 0:
            literals[eqn.result] = eqn.attrs["value"]
        call = Call(eqn, scope, literals, started)
        results = _results(call, [known[v] for v in eqn.operands])
        started.update((r, call) for r in eqn.results if isinstance(r.type, AsyncType))
        known.update(zip(eqn.results, results, strict=True))
    return [known[v] for v in graph.outputs]


def _results(call: Call, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    eqn = call.eqn
    emitter = EMITTERS.get(eqn.op)
    if emitter is None:
        raise UnsupportedError(f"{eqn.source}: the torch backend has no emitter for {eqn.op}")
    set_stack_trace([str(eqn.source)])  # what Inductor says of an op it cannot lower
    try:
        out = emitter(call, *operands)
    except UnsupportedError as error:
        raise UnsupportedError(f"{eqn.source}: {error}") from error
    except Exception as error:
        types = ", ".join(repr(v.type) for v in eqn.operands)
        raise UnsupportedError(
            f"{eqn.source}: torch cannot compute {eqn.op}({types}) on {call.device}: {error}"
        ) from error
    results = (out,) if isinstance(out, Tensor) else tuple(out)
    for x, value in zip(results, eqn.results, strict=True):
        if isinstance(value.type, AsyncType):
            continue  # in whatever form it travels
        if (tuple(x.shape), x.dtype) != (value.type.shape, carrier(value.type.dtype)):
            raise UnsupportedError(
                f"{eqn.source}: {eqn.op} was emitted as {x.dtype} {list(x.shape)}, which does not hold "
                f"its result {value.type}; this is a fault of the torch backend"
            )
    return results
