"""Where a model runs while it is captured, and standing in for a device this machine does not have.

The IR knows no devices. For `cuda` on a machine without one the model runs on fake CPU tensors, and what it asks to
make on `cuda` is made there too.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from plait.core_ir.errors import CaptureError

_CPU = torch.device("cpu")


def device_wanted(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """The device asked for, else that of the model; a model on `meta` is captured on the CPU."""
    if device is not None:
        return torch.device(device)
    held = [t.device for t in (*model.parameters(), *model.buffers())]
    return held[0] if held and held[0].type != "meta" else _CPU


@contextmanager
def capture_device(wanted: torch.device) -> Iterator[torch.device]:
    """The device for fake tensors; inside, one that is not here is the CPU."""
    if wanted.type != "cuda" or torch.cuda.is_available():
        yield wanted
        return
    with _OnCpu(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="CUDA is not available")
        try:
            yield _CPU
        except UserWarning as warning:
            raise CaptureError(
                "torch.autocast('cuda') has no effect on a machine without CUDA, so the program would have other "
                "dtypes than on the GPU; capture it there, or cast the model itself"
            ) from warning


class _OnCpu(TorchFunctionMode):
    """Calls that name `cuda` name the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        args, kwargs = pytree.tree_map(_moved, (args, kwargs or {}))
        return func(*args, **kwargs)


def _moved(x: Any) -> Any:
    named = isinstance(x, torch.device) or (isinstance(x, str) and x.split(":")[0] == "cuda")
    return _CPU if named and torch.device(x).type == "cuda" else x
