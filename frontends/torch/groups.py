"""The axis of a process group that a captured collective names.

NOTE: groups are found in torch's own table of names, which is private. Tested with torch 2.13.
"""

from typing import Any

import torch.distributed._functional_collectives  # noqa: F401  registers the ops and what they do to fake tensors
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from plait.core_ir.errors import UnsupportedError
from plait.core_ir.graph import Source
from plait.core_ir.ops.collective import group_name

_PREFIX = group_name("")


def axis_of(group: Any, where: Source) -> str:
    """The axis of a group, given by its name or itself. UnsupportedError where it is not that of an axis."""
    name = str(getattr(group, "group_name", group))
    axis = name.removeprefix(_PREFIX)
    if axis in ("", name):
        raise UnsupportedError(
            f"{where}: a collective over process group {name!r}, which is not along an axis of a mesh known to Plait; "
            f"groups along an axis are named {group_name('AXIS')!r}"
        )
    return axis


def size_of(group: Any, where: Source) -> int:
    """The number of ranks of a group. UnsupportedError where this process does not know the group."""
    if hasattr(group, "size"):
        return int(group.size())
    try:
        return int(_resolve_process_group(GroupName(str(group))).size())
    except RuntimeError as error:
        raise UnsupportedError(
            f"{where}: a collective over process group {group!r}, which this process has not made: {error}"
        ) from error
