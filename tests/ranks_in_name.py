"""Ranks that exist in name only, for models that are built on one of several."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def ranks_in_name_only(axes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """The mesh of which this process is the first rank; there are no others."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(axes.values()))
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
