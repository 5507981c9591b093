"""Standing in for functions of torch while a model is captured, under whatever module holds them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

Functions: TypeAlias = Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]
"""By name, what is there and what stands in for it."""


@contextmanager
def replaced(functions: Functions) -> Iterator[None]:
    """Inside, a function stands in for another of a name in every module that has it, its own or imported."""
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    held = [
        (vars(module), name)
        for module in modules
        for name, (original, _) in functions.items()
        if vars(module).get(name) is original
    ]
    try:
        for table, name in held:
            table[name] = functions[name][1]
        yield
    finally:
        for table, name in held:
            table[name] = functions[name][0]
