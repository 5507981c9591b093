"""The one adapter to Inductor's private API. Tested with torch 2.13.0.

`compile_fx_inner` takes an aten graph with fake examples and returns a boxed function. It does not enter AOTAutograd
again, and does not decompose: the graph is traced with `decompositions()` before.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

with warnings.catch_warnings():  # torch warns of its own use of torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

Boxed = Callable[[list[Tensor]], Sequence[Tensor]]
"""A function of a list of tensors, which it clears."""

# Roundings stand where the IR has them, nothing is chosen by measuring, and every run does the same.
SETTINGS: dict[str, Any] = {
    "deterministic": True,
    "emulate_precision_casts": True,
    "max_autotune": False,
    "triton.cudagraphs": False,
}

# What Inductor would move for locality or memory stays where it is: the order of a graph that communicates is chosen.
IN_ORDER: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
}

EXPECTED_WARNINGS = (
    "TensorFloat32 tensor cores",  # off on purpose: they round f32
    "Torchinductor does not support code generation for complex operators",  # it calls aten's
    "bf16 and fp16 are mixed in the scheduler node",
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor's lowerings count on."""
    return dict(select_decomp_table())


def compile_graph(
    module: GraphModule,
    num_outputs: int,
    fake: Sequence[Tensor],
    mode: FakeTensorMode,
    *,
    in_order: bool = False,
) -> Boxed:
    """A traced graph as compiled code; outputs keep the strides they were traced with.

    in_order: collectives, and what computes between their start and their wait, run in the order of the graph.
    `mode` must have a ShapeEnv, or Inductor's cache on disk is bypassed.
    """
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(num_outputs))
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(config.patch({**SETTINGS, **(IN_ORDER if in_order else {})}))
        stack.enter_context(warnings.catch_warnings())
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        compiled: Boxed = compile_fx_inner(module, list(fake))
    return compiled
