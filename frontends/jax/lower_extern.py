"""The way out: a primitive without a rule becomes an `extern` that runs on the JAX backend of this process alone."""

import json
from collections.abc import Mapping
from enum import Enum
from itertools import count
from typing import Any

import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.errors import CaptureError
from plait.core_ir.externs import register
from plait.core_ir.graph import Value
from plait.core_ir.ops import control
from plait.frontends.jax.jaxpr import is_key_atom
from plait.frontends.jax.site import Site

_calls = count()

# What talks to the host, or to other devices in ways that have no lowering.
_REFUSED = {
    "pure_callback": "a callback to the host",
    "io_callback": "a callback to the host",
    "debug_callback": "a callback to the host (jax.debug.print or callback)",
    "debug_print": "a callback to the host (jax.debug.print)",
    "mesh_cast": "a sharding annotation",
    "device_put": "a placement on a device",
    "ragged_all_to_all": "an exchange whose sizes depend on the data",
    **dict.fromkeys(
        (
            *("pbroadcast", "psend", "precv", "all_gather_reduced"),
            *("unreduced_psum", "unreduced_reduce_scatter", "preduced", "vary_unreduced_cast_p"),
        ),
        "a collective without a lowering",
    ),
}

_INSTEAD = {
    "ragged_all_to_all": "pad the parts to one size, a capacity for each rank, and exchange them by all_to_all"
}


def extern(b: Builder, site: Site, *operands: Value) -> tuple[Value, ...]:
    """Append the equation as it is: an extern whose callable binds the primitive with its parameters."""
    eqn = site.eqn
    name = eqn.primitive.name
    if name in _REFUSED:
        raise CaptureError(
            f"{site.source}: {name}, {_REFUSED[name]}, cannot be part of a captured step; "
            f"{_INSTEAD.get(name, 'take it out of the loss')}"
        )
    if eqn.effects:
        raise CaptureError(
            f"{site.source}: {name} has effects ({', '.join(map(str, eqn.effects))}), which a captured step cannot "
            "have; take it out of the loss"
        )
    if any(is_key_atom(v) for v in (*eqn.invars, *eqn.outvars)):
        raise CaptureError(
            f"{site.source}: {name} on PRNG keys has no lowering; draw with jax.random.bits, uniform, normal, "
            "bernoulli or others made of them"
        )
    target = f"jax:{name}"
    spec = _spec(eqn.params)
    register(target, spec, _bind(eqn.primitive, eqn.params))
    return b.emit(control.extern, *operands, target=target, results=site.results, spec=spec)


def _spec(params: Mapping[str, Any]) -> str:
    """The parameters as text; with a number of its own where text may not tell two values apart (jaxprs, arrays)."""
    shown = {key: repr(value) for key, value in sorted(params.items())}
    if not all(map(_is_plain, params.values())):
        shown["call"] = str(next(_calls))
    return json.dumps(shown)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, Enum, np.dtype, np.number))


def _bind(primitive: Any, params: dict[str, Any]) -> Any:
    def call(*operands: Any) -> tuple[Any, ...]:
        results = primitive.bind(*operands, **params)
        return tuple(results) if primitive.multiple_results else (results,)

    return call
