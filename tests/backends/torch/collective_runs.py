"""What the tests of collectives run on each rank: `collective_runs.py CODEGEN`; an exception is a failure."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from collective_cases import RanksCase, cases
from op_families.case import ALL
from torch.distributed.device_mesh import init_device_mesh

from plait.backends.torch.arrays import to_torch
from plait.backends.torch.compile import compile_task
from plait.backends.torch.mesh_groups import axis_group, release_axis
from plait.core_ir.arrays import to_numpy

CPU = torch.device("cpu")
DTYPES = {"eager": ALL, "inductor": ("f32", "bool", "u32")}
"""What to run: Inductor takes seconds for each kernel, and an element type has its own."""


def run(case: RanksCase, rank: int, codegen: str) -> None:
    """One rank's part of a case, twice: collectives leave nothing behind."""
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    for axis in case.mesh:
        axis_group(mesh, axis)
    for turn in range(dist.get_world_size()):  # the first rank compiles, the others find its code
        if turn == rank:
            task = compile_task(case.graph, codegen=codegen, device=CPU)
        dist.barrier()
    expected = case.expected()[rank]
    for _ in range(2):
        operands: list[Any] = [to_torch(x, None, CPU).clone() for x in case.operands[rank]]
        case.check_rank(rank, [to_numpy(y) for y in task(operands)], expected)
    for axis in case.mesh:
        release_axis(axis)
        release_axis(axis)


def main(codegen: str) -> None:
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    for case in cases(size, DTYPES[codegen]):
        if size < 4 or len(case.mesh) > 1:
            run(case, rank, codegen)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
