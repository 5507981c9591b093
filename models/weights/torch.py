"""Weights of a PyTorch model as NumPy arrays, by the names of `named_parameters()`."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn


def read(model: nn.Module) -> dict[str, npt.NDArray[np.generic]]:
    """Copies of all parameters; a tied one once, by its first name."""
    return {name: p.detach().cpu().numpy().copy() for name, p in model.named_parameters()}


def write(model: nn.Module, weights: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Sets every parameter of `model` in place.

    Raises:
        ValueError: the names of `weights` are not exactly those of the model.
    """
    params = dict(model.named_parameters())
    if params.keys() != weights.keys():
        raise ValueError(f"names differ: {sorted(params.keys() ^ weights.keys())}")
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(torch.tensor(weights[name]))
