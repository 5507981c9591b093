"""Weights of the gated MLP between PyTorch and Flax: names and layouts are the same."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Weights = Mapping[str, npt.NDArray[np.generic]]


def to_flax(weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
    """PyTorch weights under Flax names."""
    return dict(weights)


def to_torch(weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
    """Flax weights under PyTorch names, the inverse of `to_flax`."""
    return dict(weights)
