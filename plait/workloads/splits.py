"""Where a named model is cut into stages."""

import re
from collections.abc import Sequence
from typing import Any

from plait.core_ir.errors import UsageError
from plait.workloads.family import Family


def even_cuts(family: Family, config: Any, num_stages: int) -> tuple[int, ...]:
    """The layers to cut before for stages of even length; UsageError where there are too few layers."""
    if not 1 <= num_stages <= config.num_layers:
        raise UsageError(
            f"{family.name} has {config.num_layers} layers, which do not fill {num_stages} stages; use fewer ranks or "
            "a larger config"
        )
    cuts: tuple[int, ...] = config.cuts(num_stages)
    return cuts


def layers_of(split: Sequence[str], config: Any) -> list[int]:
    """The layers that module paths name, as a Flax model is cut before layers alone; UsageError for other paths."""
    found = [re.fullmatch(r"layers\.(\d+)", path) for path in split]
    if None in found:
        raise UsageError(
            f"split {list(split)}: the Flax models are cut before layers; write layers.1, layers.2, ..."
        )
    layers = [int(match[1]) for match in found if match]
    if sorted({*layers} & {*range(1, config.num_layers)}) != layers:
        raise UsageError(
            f"split {list(split)}: name layers once, in order, of layers.1 to layers.{config.num_layers - 1}"
        )
    return layers


def check_layers(split: Sequence[str], config: Any) -> None:
    """UsageError where a module path names a layer that a model does not have."""
    for path in split:
        found = re.match(r"layers\.(\d+)(\.|$)", path)
        if found and int(found[1]) >= config.num_layers:
            raise UsageError(
                f"--split {path}: the model has the layers layers.0 to layers.{config.num_layers - 1}"
            )
