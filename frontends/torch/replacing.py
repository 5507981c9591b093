"""Standing in for functions of torch while a model is captured, under whatever module holds them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


@contextmanager
def replaced(
    functions: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]],
) -> Iterator[None]:
    """Inside, a function stands in for another of a name in every module that has it, imported from elsewhere or not.

    functions: by name, what is there and what stands in for it.
    """
    with ExitStack() as stack:
        for module in [m for m in sys.modules.values() if isinstance(m, ModuleType)]:
            held = vars(module)
            for name, (original, other) in functions.items():
                if held.get(name) is original:
                    stack.enter_context(mock.patch.dict(held, {name: other}))
        yield
