"""The engines of the torch backend by name, and the device they run on."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from plait.backends.runtime import Engine
from plait.backends.torch.engine_distributed import DistributedEngine
from plait.backends.torch.engine_local import LocalEngine
from plait.backends.torch.engine_local_mesh import LocalMeshEngine
from plait.backends.torch.process_group import group, is_initialised
from plait.core_ir.errors import UsageError
from plait.core_ir.mesh import Layout, Mesh
from plait.core_ir.program import Program
from plait.core_ir.schedule.schedule import Schedule


def join(engine: str) -> None:
    """Meet the other ranks of a distributed run: from here on a rank that ends is noticed by all.

    UsageError for a distributed engine without a process group.
    """
    if engine != "distributed":
        return
    if not is_initialised():
        raise UsageError(
            "engine='distributed' needs a process group: run under torchrun and call "
            "torch.distributed.init_process_group() before plait.compile"
        )
    if dist.get_backend() == "fake":
        raise UsageError(
            "engine='distributed' needs a process group with other processes in it, and this one is 'fake', in which "
            "nothing is sent; leave the engine out, or use engine='local', which runs all ranks in this process"
        )
    group()


def resolve_device(device: Any) -> torch.device:
    """The device asked for, else cuda:LOCAL_RANK when there is one, else cpu. UsageError for one that is not there."""
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {device!r} is not a torch device: {error}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"device must be cpu or cuda, got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, but torch sees no CUDA device here")
    return chosen


def device_name(device: torch.device) -> str | None:
    """What its driver calls a GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def build(
    program: Program,
    schedule: Schedule,
    *,
    engine: str,
    device: torch.device,
    codegen: str,
    mesh: Mesh | None = None,
    layouts: Mapping[str, Layout] | None = None,
) -> Engine:
    """Compile a program under a schedule, and as many replicas of it as there are.

    layouts: of parameters and buffers by name, where ranks hold parts of them.
    """
    if engine == "distributed":
        return DistributedEngine(
            program, schedule, device=device, codegen=codegen, mesh=mesh, layouts=layouts
        )
    if mesh is None or len(mesh.other_axes) == 0:
        return LocalEngine(program, schedule, device=device, codegen=codegen)
    return LocalMeshEngine(mesh, layouts or {}, program, schedule, device=device, codegen=codegen)


def tell_other_ranks(error: Exception) -> None:
    """Have every other rank of a distributed run raise what this one met before it knew its engine."""
    if is_initialised():
        group().agree(error, resolve_device(None))


def agree(engine: str, device: torch.device | None, error: Exception | None, text: str) -> None:
    """Raise what went wrong in compiling; on every rank of a distributed run, whichever rank met it.

    `text`: program and schedule; ranks whose texts differ cannot run together.
    """
    if engine == "distributed":
        group().agree(error, device or resolve_device(None))
        group().agree_on_text(text, "program or schedule")
    elif error is not None:
        raise error
