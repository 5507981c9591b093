"""Which JAX devices an engine runs on, and where it leaves its results."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from plait.core_ir.errors import UsageError


def devices_for(
    num_ranks: int, devices: Sequence[jax.Device] | None = None
) -> tuple[jax.Device, ...]:
    """The first `num_ranks` of the given devices, by default of all; one for each rank.

    Raises UsageError where there are too few, saying how to get them.
    """
    found = tuple(jax.devices() if devices is None else devices)
    if len(found) >= num_ranks:
        return found[:num_ranks]
    kind = found[0].platform if found else "usable"
    raise UsageError(
        f"{num_ranks} ranks need {num_ranks} devices, and there are {len(found)} {kind} devices. Set "
        f'XLA_FLAGS="--xla_force_host_platform_device_count={num_ranks}" before JAX starts to have that many on the '
        "CPU, or use fewer ranks"
    )


def beside(
    grads: Mapping[str, jax.Array], params: Mapping[str, Any], default: jax.Device
) -> dict[str, jax.Array]:
    """Each gradient where its parameter lies; on `default` where that is no JAX array.

    So optimizers work, which compute on parameters and gradients, and on all gradients, together.
    """
    placed: dict[str, jax.Array] = {}
    for name, grad in grads.items():
        param = params[name]
        where = param.sharding if isinstance(param, jax.Array) else default
        placed[name] = jax.device_put(grad, where)
    return placed
