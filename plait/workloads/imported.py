"""A user's own function by its path, `package.module:build`."""

import ast
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plait.core_ir.errors import UsageError

_DYNAMIC = frozenset({"__getattr__", "exec", "globals", "setattr", "vars", "modules", "__dict__"})
"""Names with which a module may define what its text does not name."""


def imported(path: str) -> Callable[[], Any]:
    """The function of a path. UsageError where there is no such module or function; what a module raises, it raises."""
    module_name, attribute = _parts(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _no_module(error.name) from None
    build = getattr(module, attribute, None)
    if not callable(build):
        raise _no_function(module_name, attribute)
    return build  # type: ignore[no-any-return]


def check_path(path: str) -> None:
    """UsageError where `imported` would raise it, as far as that can be told without running the module."""
    module_name, attribute = _parts(path)
    try:
        spec = find_spec(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            return
        raise _no_module(error.name) from None
    except Exception:  # of a package around it: whoever imports it is told
        return
    if spec is None:
        raise _no_module(module_name)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        names = _names(ast.parse(Path(spec.origin).read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return
    if attribute not in names and "*" not in names and not names & _DYNAMIC:
        raise _no_function(module_name, attribute)


def _names(module: ast.Module) -> set[str]:
    """Whatever the text of a module calls anything."""
    found: set[str] = set()
    for node in ast.walk(module):
        for field in ("id", "attr", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.update((value, value.split(".")[0]))
    return found


def _parts(path: str) -> tuple[str, str]:
    module_name, _, attribute = path.partition(":")
    if not all(name.isidentifier() for name in (*module_name.split("."), attribute)):
        raise UsageError(f"{path!r} is no path of a function; name a model as package.module:build")
    return module_name, attribute


def _no_module(name: str) -> UsageError:
    return UsageError(
        f"there is no module {name!r}; name a model as package.module:build, as Python imports it from here"
    )


def _no_function(module_name: str, attribute: str) -> UsageError:
    return UsageError(f"module {module_name!r} has no function {attribute!r}")
