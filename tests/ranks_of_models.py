"""Models that several ranks run together: what torch computes on each rank, beside what was captured of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait.core_ir.arrays import to_numpy
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh
from plait.core_ir.op import Array
from plait.core_ir.text import print_graph
from plait.core_ir.verify import verify
from plait.frontends.captured import Captured
from plait.frontends.torch.capture import capture

Results = dict[tuple[str, str], Array]
"""Loss, gradients and changed buffers by role and name."""


def local(x: Any) -> Array:
    """What this rank holds of a tensor."""
    return to_numpy(x.to_local() if hasattr(x, "to_local") else x)


def placed(grad: Any, parameter: Any) -> Any:
    """A gradient with the placements of its parameter."""
    if not isinstance(parameter, DTensor):
        return grad
    return grad.redistribute(parameter.device_mesh, parameter.placements)


def eager(loss_fn: Callable[[Any, Any], Any], model: nn.Module, batch: Any) -> Results:
    """What torch computes on this rank; gradients of DTensors as these lie, which torch may leave as partial sums."""
    model.zero_grad()
    loss = loss_fn(model, batch)
    loss.backward()
    grads = {n: placed(p.grad, p) for n, p in model.named_parameters() if p.grad is not None}
    return {
        ("loss", ""): local(loss.detach()),
        **{("param_grad", n): local(g) for n, g in grads.items()},
    }


def operands(captured: Captured, batch: Any) -> list[Array]:
    """The operands of the captured program on this rank."""
    held, leaves = captured.read_leaves(), dict(captured.flatten_batch(batch))
    found: list[Array] = []
    for port, value in zip(captured.graph.input_ports, captured.graph.inputs, strict=True):
        if port.role == "rng_key":
            found.append(np.zeros(2, np.uint32))
        elif port.role == "loss_grad":
            found.append(np.ones((), value.type.dtype.numpy))
        else:
            found.append(local((leaves if port.role == "batch" else held)[port.name]))
    return found


def everywhere(item: Any) -> list[Any]:
    """What each rank passes."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def check_captured(
    loss_fn: Callable[[Any, Any], Any],
    model: nn.Module,
    batch: Any,
    mesh: Mesh,
    in_torch: Callable[[Callable[[Any, Any], Any], nn.Module, Any], Results] = eager,
    tolerance: float = 1e-5,
    split: Sequence[str] = (),
) -> tuple[Captured, Results]:
    """Assert that every rank captures one program, and that run on all of them it gives what torch gives on each.

    A collective call. The captured model, and what torch computes on this rank, which `in_torch` gives.
    """
    captured = capture(loss_fn, model, batch, num_microbatches=1, mesh=mesh, split=split)
    graph = verify(captured.graph)
    texts = everywhere(print_graph(graph))
    assert texts == [texts[0]] * len(texts)
    given = everywhere(operands(captured, batch))
    before = {name: x.clone() for name, x in model.named_buffers()}
    expected = in_torch(loss_fn, model, batch)
    for name, x in model.named_buffers():
        if ("buffer_update", name) in {(p.role, p.name) for p in graph.output_ports}:
            expected["buffer_update", name] = local(x.clone())
            x.copy_(before[name])
    results = interpret_ranks(graph, given, mesh.axes)[dist.get_rank()]
    found = {(p.role, p.name): r for p, r in zip(graph.output_ports, results, strict=True)}
    compare(found, expected, tolerance)
    return captured, expected


def compare(found: Mapping[Any, Array], expected: Mapping[Any, Array], tolerance: float) -> None:
    """Assert that results are equal, by the largest entry of each, or 1e-3 of the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(np.abs(x).max(initial=0) for x in expected.values())
    for key, want in expected.items():
        got = found[key]
        assert (got.shape, got.dtype) == (want.shape, want.dtype), key
        error = np.abs(got - want).max(initial=0)
        assert error <= tolerance * max(np.abs(want).max(initial=0), 1e-3 * largest), (key, error)
