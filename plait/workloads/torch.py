"""A model of `plait.models` in PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from plait.core_ir.op import Array
from plait.extras import load
from plait.models.weights import torch as weights


def build(
    name: str, config: Any, axes: Mapping[str, int], *, dtype: str, abstract: bool
) -> tuple[Callable[..., Any], Callable[..., Any], torch.nn.Module]:
    """The loss, on one device and over a mesh, and the model; an abstract model lives on `meta` and has no weights."""
    module = load("torch", f"models.{name}.torch")
    with torch.device("meta") if abstract else nullcontext():
        model: torch.nn.Module = module.build(config)
    if axes:  # state that every replica would change on its own
        model.eval()
    return module.loss_fn, module.loss_fn, model.bfloat16() if dtype == "bf16" else model


def initial_weights(name: str, config: Any) -> dict[str, Array]:
    """The weights that `build` gives a model, by torch's names."""
    return weights.read(load("torch", f"models.{name}.torch").build(config))


def split_paths(cuts: Sequence[int]) -> list[str]:
    """The module paths to cut before."""
    return [f"layers.{cut}" for cut in cuts]
