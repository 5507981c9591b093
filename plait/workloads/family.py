"""The models in `plait.models` by name: each a folder with the same files."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from plait import models
from plait.core_ir.errors import UsageError


@dataclass(frozen=True)
class Family:
    """One model: its sizes by name, its stream of batches, its conversion of weights."""

    name: str
    configs: Mapping[str, Any]
    batches: Callable[..., Iterator[Any]]
    convert: ModuleType

    def config(self, name: str) -> Any:
        """A size; UsageError, listing those there are, for an unknown name."""
        if name not in self.configs:
            known = ", ".join(self.configs)
            raise UsageError(f"{self.name} has no config {name!r}; there are: {known}")
        return self.configs[name]


def family_names() -> tuple[str, ...]:
    """The models there are."""
    names = (module.name for module in pkgutil.iter_modules(models.__path__) if module.ispkg)
    return tuple(name for name in names if find_spec(f"plait.models.{name}.config"))


def find_family(name: str) -> Family:
    """The model called `name`; UsageError, listing those there are, for an unknown name."""
    if name not in family_names():
        raise UsageError(
            f"unknown model {name!r}; there are: {', '.join(family_names())}; or name a function of your own as "
            "package.module:build, where build() -> (loss_fn, model, batch)"
        )
    config = importlib.import_module(f"plait.models.{name}.config")
    convert = importlib.import_module(f"plait.models.{name}.convert")
    return Family(name, config.CONFIGS, config.batches, convert)
