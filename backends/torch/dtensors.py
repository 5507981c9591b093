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


def local_part_of(value: Any, x: Tensor) -> Any:
    """Of a value of x's shape what this rank holds, where `x` is a DTensor; else the value."""
    if not isinstance(x, DTensor) or tuple(value.shape) != tuple(x.shape):
        return value
    return local_part(value if isinstance(value, DTensor) else _distributed(value, x))


def copy_into(target: Tensor, value: Any) -> None:
    """Write a value of the same shape; of a plain tensor, into a DTensor, this rank's part."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = _distributed(value, target)
    target.copy_(value)


def _distributed(value: Any, x: DTensor) -> DTensor:
    device = x.device_mesh.device_type if x.is_meta else local_part(x).device
    given = torch.as_tensor(value, device=device)
    return distribute_tensor(given, x.device_mesh, x.placements, src_data_rank=None)
