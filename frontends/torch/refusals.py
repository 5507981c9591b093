"""What a capture refuses of a model before it runs, and errors of any kind while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import _NormBase

from plait.core_ir.errors import CaptureError, PlaitError
from plait.frontends.torch.sources import raising_source

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel)


@contextmanager
def told() -> Iterator[None]:
    """An exception of any kind inside comes out as a CaptureError with the user's line, and itself as the cause.

    In a distributed run all ranks learn of it then.
    """
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        where = raising_source(error.__traceback__)
        raise CaptureError(
            f"{where}: the model cannot be captured, it raised {type(error).__qualname__}: {error}"
        ) from error


def refuse_modules(model: nn.Module) -> None:
    """CaptureError for a module that cannot be captured as it is set up."""
    for name, module in model.named_modules():
        what = f"module {name!r} ({type(module).__qualname__})" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{what} was made by torch.jit, which runs it outside Python; pass the nn.Module it was made from"
            )
        if isinstance(module, _WRAPPERS):
            raise CaptureError(
                f"{what} wraps a model for data parallel training; pass the model itself: an axis of mesh= that it "
                "does not name is data parallel, and fully_shard, or plait.passes.Sharding, shards parameters over one"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CaptureError(
                f"{what} has sparse=True: sparse gradients cannot be captured; pass sparse=False"
            )
        if isinstance(module, _NormBase) and _averages_by_count(module):
            raise CaptureError(
                f"{what} has momentum=None: torch reads the number of batches so far as a Python number, which is not "
                "known while it is captured; set a momentum, or put it in eval mode"
            )


def _averages_by_count(module: _NormBase) -> bool:
    counts = module.training and module.track_running_stats
    return counts and module.momentum is None and module.num_batches_tracked is not None
