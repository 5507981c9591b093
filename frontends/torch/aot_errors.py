"""What a capture says where torch raises, or would capture what Plait has no form for. Tested with torch 2.13.0."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from plait.core_ir.errors import CaptureError, PlaitError, UnsupportedError
from plait.frontends.torch.groups import COMMUNICATION


def explained(error: Exception, place: str) -> CaptureError:
    """What is to be said of an exception that left the capture.

    place: the user's line that raised it, or the forward line in whose backward it was raised.
    """
    text = str(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return CaptureError(f"{place}: {_data_dependent(error.func)}")
    if isinstance(error, AssertionError) and "Unexpected fake buffer" in text:
        return CaptureError(
            "the loss reads a tensor that an earlier forward left outside the model (a global, a closure, an object "
            "that is no module); state that lasts from one microbatch to the next must be a buffer: register_buffer"
        )
    if "use_reentrant=True" in text:
        return CaptureError(
            "torch.utils.checkpoint with use_reentrant=True runs a backward of its own inside the backward, which "
            "cannot be captured; pass use_reentrant=False"
        )
    if "modified by an inplace operation" in text:
        return CaptureError(
            f"{place}: a later line changes in place what this backward reads ({text.partition('. Hint')[0]}); use the "
            "op that is not in place there (x = x * 2 for x.mul_(2)), or give it a clone()"
        )
    return CaptureError(
        f"{place}: the model cannot be captured, it raised {type(error).__qualname__}: {text}"
    )


def _data_dependent(func: Any) -> str:
    if func is torch.ops.aten._local_scalar_dense.default:
        return (
            "the value of a tensor is read as a Python number (item(), int(), float(), an if, a shape or a bound of a "
            "slice), but it depends on the data, which is not known while the model is captured. A number in the batch "
            "is such a tensor: an input, which may differ from batch to batch. Keep it as a tensor (torch.where in "
            "place of an if), and pad the parts that ranks exchange to one size; a setting that does not change "
            "belongs in a closure, or in the batch as a str"
        )
    return (
        f"{func} gives a shape or a Python value that depends on the data, so the program is not one graph; use an op "
        "with a fixed shape (torch.where, masked_fill, topk, a padded length)"
    )


def refusal(where: str, op: HigherOrderOperator, args: Sequence[Any]) -> PlaitError:
    """Of an op over functions, such as cond, and of the wrapper that makes an op functional."""
    name = str(op)
    if name == "with_effects":
        if args[1].namespace in COMMUNICATION:
            return UnsupportedError(
                f"{where}: {args[1]} communicates between ranks and cannot be captured as it is called here. Call "
                "torch.distributed.all_reduce, all_gather, all_gather_into_tensor, reduce_scatter, "
                "reduce_scatter_tensor, all_to_all, all_to_all_single or batch_isend_irecv by this full name, or a "
                "functional collective (torch.distributed._functional_collectives), which has a gradient too"
            )
        checked = (
            "checks at run time whether a matrix can be inverted or factored, and raises; use the op that returns "
            "`info` in place of raising (torch.linalg.inv_ex, cholesky_ex, solve_ex, lu_factor_ex)"
            if args[1] is torch.ops.aten._linalg_check_errors.default
            else "does something beside its results, such as printing; take it out of the loss"
        )
        return CaptureError(f"{where}: {args[1]} {checked}")
    if name.startswith("auto_functionalized"):
        return CaptureError(
            f"{where}: {args[0]} changes its arguments; a captured program is functional: return new tensors instead"
        )
    return CaptureError(
        f"{where}: {name} takes functions as arguments, which is not captured; write it in plain operations "
        "(torch.where in place of cond), or as a custom op (torch.library.custom_op with register_autograd)"
    )


def hooked(place: str) -> CaptureError:
    """For hooks on what autograd saves."""
    return CaptureError(
        f"{place}: saved_tensors_hooks may change what a backward reads, and a captured backward reads values as they "
        "are; leave them out, or have an autograd.Function save another form of what it needs"
    )
