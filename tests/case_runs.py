"""Running one small model from both frontends on every backend and engine.

A case's loss is written once: parameters come as `p["w"]` (a torch ParameterDict, or a dict of JAX arrays), and methods
such as `@`, `.sum()`, `.reshape` are common to both. `ops(framework)` has the few functions that are not methods.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import plait

Arrays = Mapping[str, npt.NDArray[Any]]

ENGINES = {"local": "torch", "mpmd": "jax", "spmd": "jax"}
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


@dataclass(frozen=True)
class Run:
    """Where a program comes from and where it runs."""

    source: str
    engine: str
    schedule: str

    @property
    def backend(self) -> str:
        return ENGINES[self.engine]

    @property
    def ops(self) -> Any:
        """torch or jax.numpy."""
        return torch if self.source == "torch" else jnp

    def array(self, content: Any, dtype: Any = np.float32) -> Any:
        """An array of the source's framework."""
        array = np.asarray(content, dtype)
        return torch.tensor(array) if self.source == "torch" else jnp.asarray(array)

    def model(self, params: Mapping[str, Any]) -> Any:
        """A model of the source's framework that holds these parameters."""
        arrays = {name: self.array(content) for name, content in params.items()}
        if self.source == "jax":
            return arrays
        return nn.ParameterDict({name: nn.Parameter(array) for name, array in arrays.items()})

    def compile(
        self, loss_fn: Callable[..., Any], model: Any, batch: Any, **options: Any
    ) -> plait.Pipeline:
        """`plait.compile` for this run."""
        if self.backend == "torch":
            options.setdefault("codegen", "eager")
        return plait.compile(
            loss_fn,
            model,
            batch,
            **{
                "schedule": self.schedule,
                "backend": self.backend,
                "engine": self.engine,
                **options,
            },
        )


def runs(
    *, schedules: tuple[str, ...] = SCHEDULES, sources: tuple[str, ...] = ("torch", "jax")
) -> Any:
    """A parametrisation over sources, engines and schedules."""
    all_runs = [Run(*each) for each in itertools.product(sources, ENGINES, schedules)]
    return pytest.mark.parametrize(
        "run", all_runs, ids=lambda r: f"{r.source}-{r.engine}-{r.schedule}"
    )


def numpy_tree(tree: Any) -> Any:
    """A tree of arrays of any framework as NumPy arrays (None stays)."""
    return jax.tree_util.tree_map(plait.to_numpy, tree)
