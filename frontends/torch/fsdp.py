"""Modules under `fully_shard` (FSDP2): what its hooks do around a forward and a backward, as part of the program.

A parameter is gathered before use, and its gradient is scattered. Where ranks run parts of a batch of their own (along
data axes of the mesh) gradients are added up, as losses are; where they run the same one, their mean is taken.

NOTE: what FSDP notes about parameters is private. Tested with torch 2.13.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from plait.core_ir.errors import CaptureError
from plait.core_ir.mesh import Mesh
from plait.frontends.torch.groups import axes_of

Place: TypeAlias = tuple[int, str]
"""Where a parameter stands: the identity of its module, and its name there."""


@dataclass(frozen=True)
class Sharded:
    """How one parameter is gathered and its gradient reduced.

    shard, replicate: the groups whose ranks have parts of it, and the same part. count: by how many ranks' number a sum
    of gradients is divided, for each of these groups.
    unsharded: that whose mesh and placements the gathered parameter has, if it is a DTensor then.
    """

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    counts: tuple[int, int]
    dim: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    unsharded: Any

    def gathered(self, part: Tensor) -> Tensor:
        """The parameter as the forward uses it; of this rank's part."""
        part = part if self.param_dtype is None else part.to(self.param_dtype)
        if self.shard is not None:
            part = functional.all_gather_single(part, self.dim, self.shard)
        if self.unsharded is None:
            return part
        spec = self.unsharded
        return DTensor.from_local(
            part, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )

    def reduced(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's part of the gradient, of that of the parameter as it was used."""
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=self.unsharded.placements)._local_tensor
        grad = grad.to(self.reduce_dtype or self.param_dtype or dtype).contiguous()
        by_shards, by_replicas = self.counts
        if self.shard is not None:
            grad = functional.reduce_scatter_single(grad, "sum", self.dim, self.shard)
            grad = grad / by_shards if by_shards > 1 else grad
        if self.replicate is not None and by_replicas > 1:
            grad = functional.all_reduce(grad, "sum", self.replicate) / by_replicas
        return grad.to(dtype)


class Unsharded(torch.autograd.Function):
    """A parameter gathered; its gradient is scattered, and lies as the parameter does."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, how: Sharded) -> Tensor:
        ctx.how, ctx.like = how, (x.device_mesh, x.placements, x.shape, x.stride(), x.dtype)
        return how.gathered(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mesh, placements, shape, stride, dtype = ctx.like
        part = ctx.how.reduced(grad, dtype)
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        ), None


def sharded_params(model: nn.Module, mesh: Mesh | None) -> dict[Place, Sharded]:
    """The parameters that FSDP has sharded, by every place where they stand."""
    found: dict[Place, Sharded] = {}
    for state in _states(model).values():
        for group in state._fsdp_param_groups:
            for param in group.fsdp_params:
                info = param._module_info
                how = _sharded(param, mesh)
                names = (info.param_name, *info.shared_param_names)
                modules = (info.module, *info.shared_modules)
                found.update({(id(m), n): how for m, n in zip(modules, names, strict=True)})
    return found


def _sharded(param: Any, mesh: Mesh | None) -> Sharded:
    info, policy = param.mesh_info, param.mp_policy
    shard = info.shard_process_group if isinstance(info, FSDPMeshInfo) else None
    replicate = info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
    counts = _count(shard, mesh), _count(replicate, mesh)
    dtypes = policy.param_dtype, policy.reduce_dtype
    unsharded = param._unsharded_dtensor_spec
    return Sharded(shard, replicate, counts, param.fsdp_placement.dim, *dtypes, unsharded)


def _count(group: dist.ProcessGroup | None, mesh: Mesh | None) -> int:
    """The number of ranks of a group that run one batch."""
    if group is None or mesh is None:
        return 1
    count = 1
    for axis in axes_of(group, mesh, "fully_shard"):
        count *= 1 if axis in mesh.data_axes else mesh.axes[axis]
    return count


def batch_axes(model: nn.Module, mesh: Mesh | None) -> frozenset[str]:
    """The axes over which FSDP has ranks run parts of a batch of their own."""
    if mesh is None:
        return frozenset()
    params = sharded_params(model, mesh).values()
    groups = {g for p in params for g in (p.shard, p.replicate) if g is not None}
    return frozenset(axis for group in groups for axis in axes_of(group, mesh, "fully_shard"))


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, modules have no hooks of FSDP, but for those that cast what goes in and comes out."""
    states = _states(model)
    for name, state in states.items():
        _check(name, state)
    tables = [
        table
        for module in model.modules()
        for table in (module._forward_pre_hooks, module._forward_hooks)
    ]
    held: list[dict[int, Callable[..., Any]]] = [dict(table) for table in tables]
    with ExitStack() as stack:
        for table in tables:
            for key, hook in list(table.items()):
                if isinstance(getattr(hook, "__self__", None), FSDPState):
                    del table[key]
        for state in states.values():
            for handle in _casting(state):
                stack.callback(handle.remove)
        try:
            yield
        finally:
            stack.close()
            for table, before in zip(tables, held, strict=True):
                table.clear()
                table.update(before)


def _casting(state: Any) -> Iterator[Any]:
    """Hooks for a state's policy of dtypes."""
    policy, (module,) = state._mp_policy, state._modules
    inner, outer = policy.param_dtype, policy.output_dtype
    if inner is not None and policy.cast_forward_inputs:

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return _cast(args, inner), _cast(kwargs, inner)

        yield module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    if outer is not None:
        yield module.register_forward_hook(lambda _, args, output: _cast(output, outer))


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _states(model: nn.Module) -> Mapping[str, Any]:
    """The state of FSDP of each module that has one, by the module's name."""
    return {
        name: module._get_fsdp_state()
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }


def _check(name: str, state: Any) -> None:
    """CaptureError for what is not captured."""
    groups = state._fsdp_param_groups
    found = {
        "several modules in one call": len(state._modules) > 1,
        "offload_policy": any(p.offload_to_cpu for g in groups for p in g.fsdp_params),
        "set_gradient_divide_factor": any(g.gradient_divide_factor is not None for g in groups),
        "set_requires_gradient_sync(False)": not all(g.reduce_grads for g in groups),
        "set_all_reduce_hook": any(g._all_reduce_hook is not None for g in groups),
        "parameters that are gathered now": any(g.is_unsharded for g in groups),
    }
    for what, is_there in found.items():
        if is_there:
            raise CaptureError(
                f"module {name!r} is under fully_shard with {what}, which is not captured; leave it out, or leave "
                "fully_shard out and have Plait shard the parameters: plait.compile(..., "
                'passes=plait.passes.Passes(sharding=plait.passes.Sharding("AXIS")))'
            )
