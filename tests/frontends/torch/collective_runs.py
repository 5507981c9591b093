"""What each gloo rank runs: torch's functional collectives themselves, and their lowering on all ranks at once."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from plait.core_ir.arrays import to_numpy
from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.interpret_ranks import interpret_ranks
from plait.core_ir.mesh import Mesh
from plait.core_ir.verify import verify
from plait.frontends.torch.dtypes import type_of
from plait.frontends.torch.lower import lower_nodes

GROUP: Any = "plait:data"
MESH = Mesh({"stage": 1, "data": 2})
c10d = torch.ops._c10d_functional
autograd = torch.ops._c10d_functional_autograd


def lowered(function: Callable[..., Any], *args: Tensor) -> Graph:
    traced = make_fx(functionalize(function), tracing_mode="fake")(*args)
    nodes = list(traced.graph.nodes)
    b = Builder("rule")
    env: dict[fx.Node, Any] = {
        n: b.input(type_of(n.meta["val"])) for n in nodes if n.op == "placeholder"
    }
    lower_nodes(b, [n for n in nodes if n.op not in ("placeholder", "output")], env, None, MESH)
    (output,) = (n for n in nodes if n.op == "output")
    for node in pytree.tree_leaves(output.args[0]):
        b.output(env[node])
    return verify(b.build())


def reduced(op: str) -> Callable[[Tensor], Tensor]:
    return lambda x: functional.all_reduce(x, op, GROUP)


def gathered_twice(x: Tensor) -> Tensor:
    """Two waits for one start, and one for a view of it."""
    started = c10d.all_gather_into_tensor(x, dist.get_world_size(), GROUP)
    viewed = started.view(-1)
    return c10d.wait_tensor(viewed) + c10d.wait_tensor(started).view(-1)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    **{f"all_reduce-{op}": reduced(op) for op in ("sum", "product", "max", "min")},
    "all_reduce-integers": lambda x: functional.all_reduce((4 * x).int(), "sum", GROUP),
    "all_reduce-number": lambda x: functional.all_reduce(x.sum(), "sum", GROUP),
    "all_gather-0": lambda x: functional.all_gather_single(x, 0, GROUP),
    "all_gather-1": lambda x: functional.all_gather_single(x, 1, GROUP),
    "reduce_scatter-0": lambda x: functional.reduce_scatter_single(x, "sum", 0, GROUP),
    "reduce_scatter-1": lambda x: functional.reduce_scatter_single(x, "max", 1, GROUP),
    "all_to_all": lambda x: functional.all_to_all_single(x, None, None, GROUP),
    "coalesced": lambda x: functional.all_reduce_coalesced([x, x[0]], "sum", GROUP),
    "gather-coalesced": lambda x: functional.all_gather_into_tensor_coalesced([x, x + 1], GROUP),
    "scatter-coalesced": lambda x: functional.reduce_scatter_tensor_coalesced(
        [x, x.T], "sum", [0, 0], GROUP
    ),
    "autograd-gather": lambda x: functional.all_gather_single_autograd(x, 0, GROUP),
    "autograd-scatter": lambda x: functional.reduce_scatter_single_autograd(x, "sum", 0, GROUP),
    "autograd-exchange": lambda x: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], GROUP),
    "gathered-twice": gathered_twice,
}


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group()
    _register_process_group(GroupName(GROUP), group)
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, function in FUNCTIONS.items():
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        graph = lowered(function, x)
        results = [torch.clone(y) for y in pytree.tree_leaves(function(x))]
        everywhere: list[Any] = [None] * size
        dist.all_gather_object(everywhere, (to_numpy(x), [to_numpy(y) for y in results]))
        found = interpret_ranks(graph, [[given] for given, _ in everywhere], {"data": size})
        for got, want in zip(found[rank], everywhere[rank][1], strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), name
            assert abs(got - want).max(initial=0) <= 1e-6 * abs(want).max(initial=1), name
    _unregister_process_group(GroupName(GROUP))
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
