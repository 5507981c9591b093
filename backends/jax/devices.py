"""Which JAX devices an engine runs on."""

from collections.abc import Sequence

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
