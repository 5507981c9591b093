"""The optional frameworks: each half of Plait is loaded when it is first asked for.

This is the one place that imports by name, so that Plait works with torch alone, with JAX alone, or with both.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, TypeAlias

from plait.core_ir.errors import MissingExtraError

Framework: TypeAlias = Literal["torch", "jax"]


def installed(framework: Framework) -> bool:
    """Whether the framework can be imported."""
    return find_spec(framework) is not None


def load(framework: Framework, module: str) -> ModuleType:
    """Import `plait.<module>`, which needs the framework; MissingExtraError, naming the extra, where it is missing."""
    if not installed(framework):
        raise MissingExtraError(
            f"plait.{module} needs {framework}, which is not installed; "
            f"install it with: pip install 'plait[{framework}]'"
        )
    return importlib.import_module(f"plait.{module}")
