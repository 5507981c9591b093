"""Cuts by module path in flax.linen: a boundary before a module's call, put there while the loss is traced."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import flax.linen as nn

from plait.core_ir.errors import CaptureError, UsageError
from plait.frontends.jax.boundary import stage_boundary


@contextmanager
def boundaries_before(paths: Collection[str]) -> Iterator[list[str]]:
    """Marks the arguments of each module of `paths` (as in `module.path`, joined by dots); yields all paths called."""
    called: list[str] = []

    def intercept(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        if context.method_name == "__call__":
            path = ".".join(context.module.path)
            called.append(path)
            if path in paths:
                args, kwargs = stage_boundary((args, kwargs), path=path)
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        yield called


def check_paths(paths: Sequence[str], called: Sequence[str], cut: Sequence[str]) -> None:
    """Each path must have cut once: CaptureError where its module was not called or was called again.

    called: paths of the linen modules that were called; cut: the path of each cut of the program.
    """
    if paths and not called:
        raise UsageError(
            f"split={list(paths)}: module paths are those of flax.linen modules, and the loss calls none; in nnx, "
            "equinox and plain functions call plait.stage_boundary(x) where a stage begins, and leave split out"
        )
    for path in paths:
        times = cut.count(path)
        if times == 0:
            names = sorted({name for name in called if name})
            near = get_close_matches(path, names, n=3) or names[:10]
            raise CaptureError(
                f"split: the loss never calls a module {path!r}; called are {', '.join(near)}"
                f"{', ...' if len(names) > len(near) else ''}"
            )
        if times > 1:
            raise CaptureError(
                f"split: module {path!r} is called {times} times, so a cut before it is not one cut; name a "
                "module that is called once, or call plait.stage_boundary where the stage begins"
            )
