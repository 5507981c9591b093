"""Emission for CUDA, with fake tensors and without a GPU: everything in the graph is on the device."""

from collections.abc import Iterator

import pytest
import torch
from op_cases import CASES, OpCase
from torch.fx import GraphModule, Node

from plait.backends.torch.emit import trace
from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.ops import OPS
from plait.core_ir.types import TensorType, bf16, f32


def nodes(module: GraphModule) -> Iterator[Node]:
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


def tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tensor_of_the_graph_is_on_the_device(case: OpCase) -> None:
    module = trace(case.graph, "cuda").module
    found = [(n, x) for n in nodes(module) for x in tensors(n.meta.get("val"))]
    assert len(found) >= len(case.graph.outputs)
    assert [n for n, x in found if x.device.type != "cuda"] == []
    attributes = [n for n in nodes(module) if n.op == "get_attr"]
    assert [
        n for n in attributes if isinstance(getattr(module, str(n.target), None), torch.Tensor)
    ] == []


def attention_graph(dtype: object, causal: bool) -> Graph:
    b = Builder("attend")
    kind = TensorType(dtype, (2, 4, 64, 32))  # type: ignore[arg-type]
    q, k, v = (b.input(kind) for _ in range(3))
    out, lse = b.emit(OPS["attention"], q, k, v, causal=causal, scale=0.2)
    grads = b.emit(OPS["attention_backward"], out, q, k, v, out, lse, causal=causal, scale=0.2)
    for value in (out, lse, *grads):
        b.output(value)
    return b.build()


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (bf16, "_scaled_dot_product_flash_attention"),
        (f32, "_scaled_dot_product_efficient_attention"),
    ],
    ids=["bf16", "f32"],
)
def test_attention_uses_the_fused_kernels(dtype: object, kernel: str) -> None:
    for causal in (False, True):
        used = [str(n.target) for n in nodes(trace(attention_graph(dtype, causal), "cuda").module)]
        assert used.count(f"aten.{kernel}.default") == 1
        assert used.count(f"aten.{kernel}_backward.default") == 1
        assert "aten.bmm.default" not in used
