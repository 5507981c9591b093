"""Collectives under shard_map on host devices, against their meaning on all ranks."""

import math

import jax
import numpy as np
import pytest
from collective_cases import RanksCase, cases
from jax.sharding import AxisType, PartitionSpec

from plait.backends.jax.emit import emit
from plait.core_ir.op import Array


def run(case: RanksCase) -> list[list[Array]]:
    """Arrays get one more dimension in front, cut over all ranks."""
    axes = tuple(case.mesh)
    num_ranks = math.prod(case.mesh.values())
    mesh = jax.make_mesh(
        tuple(case.mesh.values()),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:num_ranks],
    )
    function = emit(case.graph)

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
