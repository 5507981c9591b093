"""The models in `plait.models` by name: each a folder with the same files."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

from plait import models
from plait.core_ir.errors import UsageError
from plait.extras import Framework, load


@dataclass(frozen=True)
class Family:
    """One model: its sizes by name, its stream of batches, its conversion of weights."""

    name: str
    configs: Mapping[str, Any]
    batches: Callable[..., Iterator[Any]]
    convert: ModuleType

    def check_mesh(self, config: Any, axes: Mapping[str, int]) -> None:
        """UsageError where the model cannot be cut over axes of a mesh with these sizes."""
        check = getattr(config, "check_mesh", None)
        if check is None:
            return
        try:
            check(axes)
        except ValueError as error:
            sizes = ",".join(f"{axis}={size}" for axis, size in axes.items())
            raise UsageError(f"{self.name} over a mesh with {sizes}: {error}") from error

    def config(self, name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """A size, with other values for some of its fields; UsageError, listing what there is, for an unknown name."""
        if name not in self.configs:
            known = ", ".join(self.configs)
            raise UsageError(f"{self.name} has no config {name!r}; there are: {known}")
        config = self.configs[name]
        there_are = [field.name for field in fields(config)]
        for field in changes:
            if field not in there_are:
                raise UsageError(
                    f"config {name!r} of {self.name} has no field {field!r}; it has: {', '.join(there_are)}"
                )
        try:
            return replace(config, **changes)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"config {name!r} of {self.name} with {dict(changes)}: {error}"
            ) from error


def parallel_form(
    name: str, framework: Framework, source: str, mesh: Mapping[str, int]
) -> tuple[ModuleType | None, dict[str, int]]:
    """The model's source over a mesh, and the axes over which it is cut; None where the mesh has none of them: what is
    to be done over others the compiler knows."""
    if find_spec(f"plait.models.{name}.parallel_{source}") is None:
        return None, {}
    module = load(framework, f"models.{name}.parallel_{source}")
    axes = {axis: size for axis, size in mesh.items() if axis in module.AXES}
    return (module if axes else None), axes


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
