"""The emitter of `extern`: a call of a torch op that has no lowering, from its JSON spec.

`{"args": [...], "kwargs": {...}}`, with the leaves `{"operand": i}`, `{"complex": [re, im]}`, `{"dtype": "float32"}`,
`{"device": true}`, `{"layout": "strided"}`, `{"memory_format": "contiguous_format"}`, and what is JSON itself.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.backends.torch.carriers import enter, leave
from plait.backends.torch.emitter import Call, Table
from plait.core_ir.errors import UnsupportedError
from plait.core_ir.ops import control as ops


def _extern(call: Call, *operands: Tensor) -> Sequence[Tensor]:
    framework, _, name = call.attrs["target"].partition(":")
    if framework != "torch":
        raise UnsupportedError(
            f"{name} is an op of {framework}, which has no lowering; it runs on the {framework} backend only"
        )
    if call.attrs.get("effect", False):
        raise UnsupportedError(f"{name} has an effect; the torch backend runs pure ops only")
    ports = [leave(x, call.type(i).dtype) for i, x in enumerate(operands)]
    spec = json.loads(call.attrs["spec"])
    args = [_decoded(arg, ports, call.device) for arg in spec["args"]]
    kwargs = {key: _decoded(arg, ports, call.device) for key, arg in spec["kwargs"].items()}
    results = [x for x in pytree.tree_leaves(_op(name)(*args, **kwargs)) if isinstance(x, Tensor)]
    return [enter(x, v.type.dtype) for x, v in zip(results, call.eqn.results, strict=True)]


def _op(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise UnsupportedError(
            f"torch has no op {name}; import the module that registers it before compiling"
        ) from None


def _decoded(arg: Any, operands: Sequence[Tensor], device: torch.device) -> Any:
    if isinstance(arg, list):
        return [_decoded(a, operands, device) for a in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, value),) = arg.items()
    match kind:
        case "operand":
            return operands[value]
        case "complex":
            return complex(*value)
        case "device":
            return device
        case "dtype" | "layout" | "memory_format":
            return getattr(torch, value)
    raise UnsupportedError(f"a spec with {kind!r}, which this version does not know")


EMITTERS: Table = {ops.extern: _extern}
