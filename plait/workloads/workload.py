"""A workload: a loss, a model and batches, made from its name."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np

from plait.core_ir.arrays import is_array
from plait.core_ir.errors import UsageError
from plait.extras import Framework, installed, load
from plait.options import framework_of
from plait.workloads.family import Family, find_family
from plait.workloads.imported import imported
from plait.workloads.splits import even_cuts, layers_of

Frontend: TypeAlias = Literal["torch", "flax"]

FRONTENDS: dict[str, Framework] = {"torch": "torch", "flax": "jax"}
"""The frontends by the names of the models' sources; "flax" stands for any JAX model."""
DTYPES = ("f32", "bf16")


@dataclass(frozen=True)
class Workload:
    """A loss, a model, an example batch, the `split` that `plait.compile` takes, and endless batches to train on.

    stream: `stream("train" | "held_out", seed)`; equal arguments give equal batches.
    """

    frontend: str
    loss_fn: Callable[..., Any]
    model: Any
    batch: Any
    split: Sequence[str] | None
    stream: Callable[[str, int], Iterator[Any]]
    plain: tuple[Callable[..., Any], Any] | None = None
    """The loss and the model on one device, where those above are over a mesh."""

    @property
    def framework(self) -> Framework:
        """The framework the model is written in."""
        return FRONTENDS[self.frontend]


@dataclass(frozen=True)
class Sizes:
    """What is chosen for a named model: its config, its dtype, the rows of a batch, the number of stages, and the mesh,
    of the stages first, where there are other axes, and other values for some fields of the config."""

    config: str
    dtype: str
    batch_size: int
    num_stages: int
    mesh: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


def is_named(model: str) -> bool:
    """Whether `model` is a name of `plait.models` rather than `package.module:build`."""
    return ":" not in model


def load_workload(
    model: str,
    frontend: str | None,
    sizes: Sizes,
    split: Sequence[str] | None = None,
    *,
    abstract: bool = False,
) -> Workload:
    """The workload of a name in `plait.models`, or of `package.module:build`.

    frontend: which source of a named model; for a `build`, None or what its model is. split: module paths to cut
    before; by default a named model is cut into `sizes.num_stages` stages of even length. Both sources of a named model
    get the same weights. abstract: types are enough, no weights are drawn.

    Raises UsageError for what is unknown or does not fit.
    """
    if not is_named(model):
        return _load_built(model, frontend, split)
    family = find_family(model)
    config = family.config(sizes.config, sizes.changes)
    if frontend not in FRONTENDS:
        raise UsageError(f"unknown frontend {frontend!r}; there are: {', '.join(FRONTENDS)}")
    if sizes.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {sizes.dtype!r}; there are: {', '.join(DTYPES)}")
    if frontend == "torch":
        side = load("torch", "workloads.torch")
        make = partial(side.build, model, config, dtype=sizes.dtype, abstract=abstract)
        loss_fn, built = make(mesh=sizes.mesh)
        plain = make() if sizes.mesh else None
        split = split or side.split_paths(even_cuts(family, config, sizes.num_stages)) or None
    else:
        side = load("jax", "workloads.flax")
        cuts = layers_of(split, config) if split else even_cuts(family, config, sizes.num_stages)
        weights = None if abstract else _converted_weights(family, config)
        plain_loss, loss_fn, built = side.build(
            model, config, sizes.mesh, cuts, weights=weights, dtype=sizes.dtype, abstract=abstract
        )
        plain = plain_loss, built
        split = None

    def stream(part: str, seed: int) -> Iterator[Any]:
        batches = family.batches(config, part, batch_size=sizes.batch_size, seed=seed)
        return (_cast(batch, sizes.dtype) for batch in batches)

    batch = next(stream("train", 0))
    return Workload(frontend, loss_fn, built, batch, split, stream, plain)


def num_tokens(batch: Any) -> int:
    """The positions of text in a batch; of a batch without text, its rows."""
    arrays = [x for x in _leaves(batch) if is_array(x) and len(x.shape)]
    texts = [x for x in arrays if len(x.shape) > 1 and "int" in str(x.dtype)]
    if texts:
        return int(texts[0].shape[0] * texts[0].shape[1])
    return int(arrays[0].shape[0]) if arrays else 0


def _load_built(path: str, frontend: str | None, split: Sequence[str] | None) -> Workload:
    build = imported(path)
    required = _required(build)
    if required:
        raise UsageError(
            f"{path} needs arguments ({', '.join(required)}), but a build is called without any; give them defaults"
        )
    made = build()
    if not isinstance(made, tuple) or len(made) != 3:
        raise UsageError(
            f"{path}() must return (loss_fn, model, batch), got a {type(made).__name__}"
        )
    loss_fn, model, batch = made
    found = "torch" if framework_of(model) == "torch" else "flax"
    if frontend not in (None, found):
        raise UsageError(
            f"{path} builds a {found} model, but the frontend asked for is {frontend!r}"
        )
    return Workload(found, loss_fn, model, batch, split, lambda part, seed: repeat(batch))


def _required(build: Callable[..., Any]) -> list[str]:
    """The names of parameters without a default."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in variable
    ]


def _converted_weights(family: Family, config: Any) -> Any:
    """The torch model's weights under Flax's names; None, for the model's own, without torch."""
    if not installed("torch"):
        return None
    side = load("torch", "workloads.torch")
    return family.convert.to_flax(side.initial_weights(family.name, config))


def _cast(batch: dict[str, Any], dtype: str) -> dict[str, Any]:
    if dtype != "bf16":
        return batch
    return {
        name: x.astype(ml_dtypes.bfloat16) if np.issubdtype(x.dtype, np.floating) else x
        for name, x in batch.items()
    }


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree
