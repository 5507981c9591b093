"""The order of pairs of MoE layers, in the text that they are lowered to and behind XLA's simplifications.

XLA on the CPU exchanges at once, and orders what it runs as it likes: of the order it can show only what is lowered.
On a GPU its scheduler starts an exchange as soon as there is something to send, and ends it where its result is first
read: behind the barrier, so behind all values that come through it. Barriers are taken out once the order is chosen.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import jax
import moe_pairs
import pytest
from jax.sharding import AxisType, PartitionSpec
from moe_pairs import HalvedPart, StableHLO

from plait.backends.jax.emit import emit
from plait.backends.jax.hiding import hiding
from plait.core_ir.graph import Value
from plait.core_ir.ops.collective import wait
from plait.core_ir.parse import parse_graph
from plait.core_ir.types import AsyncType

GRAPH = """plait.ir 1

graph @t(%x: f32[4, 4] {{activation "x"}}, %w: f32[4, 4] {{param "w"}}, %g: f32[4, 4] {{gradient "g"}})
    -> (%y: f32[4, 4] {{activation "y"}}, {outputs}) {{
  %h: async<f32[4, 4]> = all_to_all(%g) {{axis="e", concat_dim=0, size=2, split_dim=0}}
  %r: f32[4, 4] = tanh(%x)
  %p: f32[4, 4] = dot_general(%r, %w) {{batch=[[], []], contract=[[1], [0]]}}
  %a: f32[4, 4] = neg(%p)
  %k: async<f32[4, 4]> = all_to_all(%{sent}) {{axis="e", concat_dim=0, size=2, split_dim=0}}
  %s: f32[4, 4] = wait(%h)
  %y: f32[4, 4] = wait(%k)
}}
"""
S = '%s: f32[4, 4] {gradient "s"}'
R = '%r: f32[4, 4] {residual "r"}'
A = '%a: f32[4, 4] {residual "a"}'


@pytest.mark.parametrize(
    ("outputs", "sent", "before", "beside"),
    [
        ((S, A), "a", ["a"], []),  # read behind the wait, and made of the product
        ((S, A, R), "p", ["a"], []),
        ((S, R), "p", ["r"], ["r"]),  # only sent: the residual that it is made of stands for it
        ((S,), "p", [], []),  # nothing of its half is read behind
    ],
    ids=["live", "the last", "sent", "a chain"],
)
def test_what_comes_through_a_barrier(
    outputs: tuple[str, ...], sent: str, before: list[str], beside: list[str]
) -> None:
    graph = parse_graph(GRAPH.format(outputs=", ".join(outputs), sent=sent))
    found = hiding(graph)
    first = next(eqn for eqn in graph.eqns if eqn.op is wait)
    assert names(found.before[first]) == before
    assert names(found.beside.values()) == beside


def names(values: Iterable[Value]) -> list[str]:
    return [value.name for value in values]


def traced(part: HalvedPart) -> jax.stages.Traced:
    """Each rank's arrays are stacked along a dimension in front."""
    mesh = jax.make_mesh(
        (moe_pairs.NUM_RANKS,),
        (moe_pairs.AXIS,),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[: moe_pairs.NUM_RANKS],
    )
    function, spec = emit(part.graph), PartitionSpec(moe_pairs.AXIS)

    def on_a_rank(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(y[None] for y in function(*(x[0] for x in arrays)))

    mapped = jax.shard_map(on_a_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    operands = [
        jax.ShapeDtypeStruct((moe_pairs.NUM_RANKS, *t.shape), t.dtype.numpy)
        for t in part.graph.input_types
    ]
    with jax.enable_x64(True):
        return jax.jit(mapped, keep_unused=True).trace(*operands)


@pytest.mark.parametrize("hardware", ["cpu-core", "h100"])
@pytest.mark.parametrize("source", ["flax", "torch"])
def test_every_exchange_ends_behind_a_product_of_the_other_half(source: str, hardware: str) -> None:
    pair, parts = moe_pairs.parts(source, hardware)
    num_exchanges = 0
    for part in parts:
        assert not any(isinstance(t, AsyncType) for t in part.graph.input_types)
        for platform in ("cpu", "cuda"):
            text = traced(part).lower(lowering_platforms=(platform,)).as_text()
            count, unhidden = StableHLO(text, part.inputs).unhidden()
            assert not unhidden
        num_exchanges += count
    assert num_exchanges == 4 == sum(eqn.op.name == "all_to_all" for eqn in pair.eqns)


def test_what_comes_through_barriers_is_kept_by_the_simplifier(tmp_path: Path) -> None:
    """XLA drops values that nothing reads behind a barrier."""
    _, (part, *_) = moe_pairs.parts("flax", "cpu-core")
    lowered = traced(part).lower()
    lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": ".*"})
    dumped = [path.read_text() for path in sorted(tmp_path.glob("*.txt"))]
    with_barriers = [text for text in dumped if " opt-barrier(" in text]
    assert len(with_barriers) > 20  # after that many steps there still are some
    types = re.findall(r"stablehlo\.optimization_barrier .* : (.*)", lowered.as_text())
    kept = re.findall(r"= \((.*)\) opt-barrier\(", with_barriers[-1])
    assert [t.count("f32[") for t in kept] == [t.count("tensor<") for t in types]
