"""Collectives under shard_map on host devices, against their meaning on all ranks."""

import math
import re

import jax
import numpy as np
import pytest
from collective_cases import RanksCase, cases, overlapped_pair
from jax.sharding import AxisType, PartitionSpec

from plait.backends.jax.emit import emit
from plait.core_ir.op import Array


def run(case: RanksCase, *, is_alone: bool = True) -> list[list[Array]]:
    """Arrays get one more dimension in front, cut over all ranks."""
    axes = tuple(case.mesh)
    num_ranks = math.prod(case.mesh.values())
    mesh = jax.make_mesh(
        tuple(case.mesh.values()),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:num_ranks],
    )
    function = emit(case.graph, is_alone=is_alone)

    def on_a_rank(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(y[None] for y in function(*(x[0] for x in arrays)))

    spec = PartitionSpec(axes)
    # Whether a value is equal along an axis is not tracked: only the IR's types are.
    mapped = jax.shard_map(on_a_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with jax.enable_x64(True):
        stacked = [np.stack(of_ranks) for of_ranks in zip(*case.operands, strict=True)]
        compiled = (
            jax.jit(mapped)
            .lower(*stacked)
            .compile(compiler_options={"xla_allow_excess_precision": False})
        )
        results = [np.asarray(y) for y in compiled(*stacked)]
    return [[np.asarray(y[rank]) for y in results] for rank in range(num_ranks)]


@pytest.mark.parametrize("case", cases(4), ids=lambda case: case.name)
def test_collectives_on_four_devices(case: RanksCase) -> None:
    case.check(run(case))


@pytest.mark.parametrize(
    "case",
    [case for case in cases(4) if case.name in ("permute", "turned", "loop")],
    ids=lambda case: case.name,
)
def test_permutes_of_groups_that_do_not_all_come(case: RanksCase) -> None:
    case.check(run(case, is_alone=False))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_order_of_an_overlapped_pair_is_lowered(platform: str) -> None:
    """Between each exchange and the barrier behind which its result stands is a product.

    What comes through barriers, so that XLA keeps this, is in `test_hiding`.
    """
    pair = overlapped_pair()
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    function = jax.shard_map(
        emit(pair),
        mesh=mesh,
        in_specs=PartitionSpec("expert"),
        out_specs=PartitionSpec("expert"),
        check_vma=False,
    )
    operands = [np.zeros((128, 64), np.float32) for _ in pair.inputs]
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    found = re.findall(r"(%\w+)(?::\d+)? = \"?stablehlo\.(\w+)\"?\(?[ (]?(%\w+)?", text)
    started = {result for result, name, _ in found if name == "all_to_all"}
    names = {"all_to_all": "all_to_all", "dot_general": "dot_general"}
    order = [
        "wait" if name == "optimization_barrier" and first in started else names.get(name)
        for _, name, first in found
    ]
    assert [name for name in order if name] == [
        eqn.op.name for eqn in pair.eqns if eqn.op.name in (*names, "wait")
    ]
