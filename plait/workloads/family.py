"""The models in `plait.models` by name: each a folder with the same files."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, get_args, get_type_hints

from plait import models
from plait.core_ir.errors import UsageError
from plait.extras import Framework, load
from plait.models import text


@dataclass(frozen=True)
class Family:
    """One model: its sizes by name, its stream of batches, its conversion of weights."""

    name: str
    configs: Mapping[str, Any]
    batches: Callable[..., Iterator[Any]]
    convert: ModuleType
    whole_axes: tuple[str, ...] = ()
    """Axes of a mesh over which the model is cut, and each rank is given the whole batch."""

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
        """A size, with other values for some of its fields.

        UsageError, listing what there is, for an unknown name, and for a value that a field cannot have.
        """
        if name not in self.configs:
            known = ", ".join(self.configs)
            raise UsageError(f"{self.name} has no config {name!r}; there are: {known}")
        config = self.configs[name]
        there_are = [field.name for field in fields(config)]
        kinds = get_type_hints(type(config))
        for field, value in changes.items():
            if field not in there_are:
                raise UsageError(
                    f"config {name!r} of {self.name} has no field {field!r}; it has: {', '.join(there_are)}"
                )
            if not _is_of(value, kinds[field]):
                kind = getattr(kinds[field], "__name__", str(kinds[field]))
                raise UsageError(
                    f"config {name!r} of {self.name}: {field} must be of type {kind}, got {value!r}"
                )
        try:
            changed = replace(config, **changes)
        except ValueError as error:
            raise UsageError(
                f"config {name!r} of {self.name} with {dict(changes)}: {error}"
            ) from error
        if getattr(changed, "vocab_size", text.VOCAB_SIZE) < text.VOCAB_SIZE:
            raise UsageError(
                f"config {name!r} of {self.name}: vocab_size must be at least {text.VOCAB_SIZE}, since the text that "
                f"it learns is bytes, got {changed.vocab_size}"
            )
        return changed


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of the type of a field; a whole number is a number."""
    kinds = get_args(kind) or (kind,)
    return type(value) in kinds or (type(value) is int and float in kinds)


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
    whole_axes = getattr(config, "WHOLE_AXES", ())
    return Family(name, config.CONFIGS, config.batches, convert, whole_axes)
