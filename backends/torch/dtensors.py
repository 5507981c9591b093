"""Parameters that are DTensors: tasks run on the parts that ranks hold, the user has DTensors.

NOTE: `_local_tensor` is private: `to_local` would have autograd follow. Tested with torch 2.13.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local_part(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is. Without autograd."""
    return x._local_tensor if isinstance(x, DTensor) else x


def like(part: Tensor, x: Tensor) -> Tensor:
    """A local part as a DTensor, where `x` is one that is cut in the same way; else the part."""
    if not isinstance(x, DTensor):
        return part
    return DTensor.from_local(
        part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def copy_into(target: Tensor, value: Any) -> None:
    """Write a value of the same shape; of a plain tensor, into a DTensor, this rank's part."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        given = torch.as_tensor(value, device=local_part(target).device)
        mesh, placements = target.device_mesh, target.placements
        value = distribute_tensor(given, mesh, placements, src_data_rank=None)
    target.copy_(value)
