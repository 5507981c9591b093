"""Lowering: the joint fx graph of aten ops to one Graph. TABLE maps each aten op to its rule.

An op without a rule is decomposed by torch's own table where that has it, and stays `extern` otherwise.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from plait.core_ir.arrays import to_numpy
from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError, PlaitError
from plait.core_ir.graph import UNKNOWN, Value
from plait.core_ir.mesh import Mesh
from plait.core_ir.ops import collective, control
from plait.core_ir.ops import random as rnd
from plait.core_ir.types import TensorType, bool_, c128, f64, i64, u32
from plait.frontends.torch import (
    lower_arithmetic,
    lower_attention,
    lower_collective,
    lower_convolution,
    lower_create,
    lower_elementwise,
    lower_index,
    lower_linalg,
    lower_nn,
    lower_norm,
    lower_order,
    lower_pool,
    lower_random,
    lower_reduce,
    lower_shape,
    lower_softmax,
    lower_strided,
)
from plait.frontends.torch.aot import PARTS, RANDOM, RECOMPUTATION, SOURCE, decomposed
from plait.frontends.torch.boundary import MARK
from plait.frontends.torch.dtypes import type_of
from plait.frontends.torch.extern import extern
from plait.frontends.torch.rules import Hidden, Result, Rules, Site

TABLE: Rules = {
    **lower_arithmetic.RULES,
    **lower_elementwise.RULES,
    **lower_shape.RULES,
    **lower_create.RULES,
    **lower_strided.RULES,
    **lower_reduce.RULES,
    **lower_order.RULES,
    **lower_softmax.RULES,
    **lower_index.RULES,
    **lower_linalg.RULES,
    **lower_convolution.RULES,
    **lower_attention.RULES,
    **lower_nn.RULES,
    **lower_norm.RULES,
    **lower_pool.RULES,
    **lower_random.RULES,
    **lower_collective.RULES,
    # checks at run time, which give nothing
    torch.ops.aten._assert_async.default: lambda s, *_: (),
    torch.ops.aten._assert_async.msg: lambda s, *_: (),
    torch.ops.aten._assert_tensor_metadata.default: lambda s, *_, **__: (),
    MARK: lambda s, xs, index, backward: s.b.emit(
        control.boundary, *xs, index=index, backward=backward
    ),
}


def lower_nodes(
    b: Builder,
    nodes: Sequence[fx.Node],
    env: dict[fx.Node, Any],
    rng_key: Value | None,
    mesh: Mesh | None = None,
) -> None:
    """Lower nodes in order; `env` holds what stands for each node, and is filled.

    What a recomputation reads of the rest stands behind a barrier, so that it is not merged with the forward.
    """
    behind: dict[tuple[int, Value], Value] = {}

    def read(value: Any, number: int | None) -> Any:
        if number is None or not isinstance(value, Value):
            return value
        if (number, value) not in behind:
            behind[number, value] = b(control.barrier, value)
        return behind[number, value]

    for node in nodes:
        if node in env:
            continue
        source, number = node.meta.get(SOURCE, UNKNOWN), node.meta.get(RECOMPUTATION)

        def operand(n: fx.Node, number: int | None = number) -> Any:
            made_here = n.meta.get(RECOMPUTATION) == number or n.op == "get_attr"
            return read(_value(env[n]), None if made_here else number)

        with b.at(source if source is not UNKNOWN else b.source):
            if node.op == "get_attr":
                env[node] = _constant(b, node)
            elif node.target is operator.getitem:
                container, index = node.args
                assert isinstance(container, fx.Node)
                env[node] = env[container][index]
            elif str(node.target).startswith("device_mesh."):
                env[node] = None  # a mesh of DTensors, which is no tensor
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
                env[node] = _lowered(b, node, args, kwargs, read(rng_key, number), mesh)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Hidden) else x


def _lowered(
    b: Builder,
    node: fx.Node,
    args: Any,
    kwargs: Mapping[str, Any],
    rng_key: Value | None,
    mesh: Mesh | None,
) -> Any:
    new_key = _key_maker(b, node, rng_key, mesh)
    site = Site(b, _types(node), _readers(node), new_key, _fakes(node), mesh)
    target: Any = node.target
    try:
        result = _ruled(site, node, args, kwargs, rng_key)
    except PlaitError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{b.source}: {target} cannot be lowered, a fault in Plait: {type(error).__qualname__}: {error}"
        ) from error
    if result is NotImplemented:
        result = extern(site, target, args, kwargs)
    return _checked(node, site, result)


def _ruled(
    site: Site, node: fx.Node, args: Any, kwargs: Mapping[str, Any], rng_key: Value | None
) -> Any:
    target: Any = node.target
    rule = TABLE.get(target)
    result: Any = NotImplemented
    if rule is not None:
        result = rule(site, *_with_a_tensor(site, target, args), **kwargs)
    if result is NotImplemented:
        result = _by_decomposition(site, node, args, kwargs, rng_key)
    return result


def _with_a_tensor(s: Site, target: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments; the one tensor of an op, if it is a number (as torch leaves it in a backward), as a tensor."""
    wants = [isinstance(a.type, torch.TensorType) for a in target._schema.arguments]
    if sum(wants) != 1 or not wants[0] or not args or type(args[0]) not in _NUMBER_DTYPES:
        return args
    return (s.b.literal(args[0], _NUMBER_DTYPES[type(args[0])]), *args[1:])


_NUMBER_DTYPES = {bool: bool_, int: i64, float: f64, complex: c128}


def _by_decomposition(
    s: Site, node: fx.Node, args: Any, kwargs: Mapping[str, Any], rng_key: Value | None
) -> Any:
    """torch's own decomposition of the call, lowered in place; NotImplemented where none leads to rules."""
    inner = decomposed(node)
    if inner is None or not _covered(inner):
        return NotImplemented
    operands = iter(_values_in((args, kwargs)))
    env: dict[fx.Node, Any] = {}
    for placeholder in (n for n in inner.graph.nodes if n.op == "placeholder"):
        env[placeholder] = next(operands)
    body = [n for n in inner.graph.nodes if n.op not in ("placeholder", "output")]
    lower_nodes(s.b, body, env, rng_key, s.mesh)
    (output,) = (n for n in inner.graph.nodes if n.op == "output")
    results = [None if n is None else env[n] for n in output.args[0]]
    return results[0] if _is_single(node) else results


def _covered(graph_module: fx.GraphModule) -> bool:
    """Whether every call has a rule, or a decomposition into such calls."""
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem or node.target in TABLE:
            continue
        inner = decomposed(node)
        if inner is None or not _covered(inner):
            return False
    return True


def _values_in(tree: Any) -> list[Value]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Value)]


def _is_single(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _types(node: fx.Node) -> tuple[TensorType | None, ...]:
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else [value]
    return tuple(_type(node, v) if isinstance(v, torch.Tensor) else None for v in results)


def _type(node: fx.Node, fake: torch.Tensor) -> TensorType:
    if fake.layout != torch.strided:
        raise CaptureError(
            f"{node.meta.get(SOURCE, UNKNOWN)}: {node.target} gives a tensor of layout {fake.layout}; only dense "
            "tensors can be captured (sparse=False, to_dense())"
        )
    return type_of(fake)


def _readers(node: fx.Node) -> tuple[frozenset[Any], ...]:
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)):
        return (frozenset(user.target for user in node.users),)
    readers: list[set[Any]] = [set() for _ in value]
    for user in node.users:
        if user.target is operator.getitem:
            readers[user.args[1]].update(reader.target for reader in user.users)  # type: ignore[index]
    return tuple(map(frozenset, readers))


def _key_maker(
    b: Builder, node: fx.Node, rng_key: Value | None, mesh: Mesh | None
) -> Callable[[], Value]:
    def new_key() -> Value:
        if rng_key is None or RANDOM not in node.meta:
            raise CaptureError(
                f"{b.source}: {node.target} draws random numbers outside the program"
            )
        key = b(rnd.fold_in, rng_key, b.literal(node.meta[RANDOM], u32))
        for axis in node.meta.get(PARTS, ()):
            assert mesh is not None
            place = b(collective.axis_index, axis=axis, size=mesh.axes[axis])
            key = b(rnd.fold_in, key, b.convert(place, u32))
        return key

    return new_key


def _fakes(node: fx.Node) -> Sequence[Any]:
    fakes: Sequence[Any] = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    return fakes


def _constant(b: Builder, node: fx.Node) -> Any:
    """A tensor the model holds neither as a parameter nor as a buffer; a graph, for an op that takes functions."""
    tensor = getattr(node.graph.owning_module, str(node.target))
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.requires_grad:
        raise CaptureError(
            f"{b.source}: a tensor of shape {list(tensor.shape)} needs a gradient but is not a parameter of the model; "
            "make it an nn.Parameter of a module of the model"
        )
    return b.literal(to_numpy(tensor))


def _checked(node: fx.Node, s: Site, result: Result) -> Any:
    """The result, once its types are what torch says of them."""
    single = isinstance(result, Value)
    values = [result] if single else list(result)  # type: ignore[arg-type]
    for value, type in zip(values, s.types, strict=False):
        if isinstance(value, Value) and type is not None and value.type != type:
            raise CaptureError(
                f"{s.b.source}: {node.target} was lowered to a result of type {value.type}, torch says {type}: "
                "a fault in Plait's rule"
            )
    if _is_single(node):
        return values[0]
    return values
