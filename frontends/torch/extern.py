"""Ops without a lowering, as `extern`: the call itself, to be run by torch's own backend.

The spec is JSON, `{"args": [...], "kwargs": {...}}`, with these leaves: `{"operand": i}` for a tensor, numbers,
strings, booleans, null and lists as they are, `{"complex": [re, im]}`, `{"dtype": "float32"}`, `{"device": true}`
(where it runs), `{"layout": "strided"}` and `{"memory_format": "contiguous_format"}`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from plait.core_ir.errors import CaptureError, UnsupportedError
from plait.core_ir.graph import Value
from plait.core_ir.ops import control
from plait.frontends.torch.groups import COMMUNICATION
from plait.frontends.torch.rules import Result, Site


def extern(s: Site, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Result:
    """The call of an op as one equation; CaptureError for what cannot stand in a pure program."""
    _check(s, target)
    operands: list[Value] = []
    spec = {
        "args": [_encoded(s, target, a, operands) for a in args],
        "kwargs": {k: _encoded(s, target, a, operands) for k, a in kwargs.items()},
    }
    results = tuple(t for t in s.types if t is not None)
    name = f"torch:{target}"
    values = iter(
        s.b.emit(control.extern, *operands, target=name, results=results, spec=json.dumps(spec))
    )
    return [None if t is None else next(values) for t in s.types]


def _check(s: Site, target: OpOverload) -> None:
    where = s.b.source
    if target.namespace in COMMUNICATION:
        raise UnsupportedError(
            f"{where}: {target} communicates between ranks and has no lowering; functional collectives that have one "
            "are all_reduce, all_gather_single, reduce_scatter_single, all_to_all_single and their coalesced forms"
        )
    if target._schema.is_mutable:
        raise CaptureError(
            f"{where}: {target} changes its arguments; a captured program is functional: return the new tensors"
        )
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise CaptureError(
            f"{where}: {target} draws random numbers and has no lowering, so they could not follow the step's key; "
            "use bernoulli, rand, randn, randint, randperm or dropout"
        )


def _encoded(s: Site, target: Any, arg: Any, operands: list[Value]) -> Any:
    match arg:
        case Value():
            operands.append(arg)
            return {"operand": len(operands) - 1}
        case None | bool() | int() | float() | str():
            return arg
        case complex():
            return {"complex": [arg.real, arg.imag]}
        case list() | tuple():
            return [_encoded(s, target, a, operands) for a in arg]
        case torch.dtype():
            return {"dtype": str(arg).removeprefix("torch.")}
        case torch.device():
            return {"device": True}
        case torch.layout():
            return {"layout": str(arg).removeprefix("torch.")}
        case torch.memory_format():
            return {"memory_format": str(arg).removeprefix("torch.")}
    raise CaptureError(
        f"{s.b.source}: {target} has an argument of type {type(arg).__qualname__}, which a program cannot hold"
    )
