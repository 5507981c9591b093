"""Where the user wrote what is being traced: the module that runs, and the innermost line outside torch and Plait."""

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from plait.core_ir.graph import UNKNOWN, Source

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")
_WRAPPERS = ("/typing_extensions.py",)
"""Ends of files outside torch that stand around what torch deprecates."""
_CAPTURE = "plait.frontends.torch.capture"
"""What calls the user's loss: whoever called it is outside."""
_API = ("plait.api", "plait.capturing", "plait.extras")


class ModuleStack:
    """Follows which module of a model runs: `path` is its name, "" outside all of them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.named_modules())
        self._stack: list[str] = []

    @property
    def path(self) -> str:
        """Name of the innermost module that runs."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def following(self) -> Iterator[None]:
        """Modules that run inside are followed."""
        handles = [
            handle for name, module in self._modules for handle in self._follow(name, module)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _follow(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            if self._stack:  # an earlier hook that raised left nothing behind
                self._stack.pop()

        return (
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )


def calling_source(module: str = "") -> Source:
    """The innermost line of the user's code that runs now; UNKNOWN where none runs inside the capture."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _CAPTURE:
        if _is_users(frame):
            return Source(module, frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN


def raising_source(traceback: TracebackType | None) -> Source:
    """The innermost line of the user's code that an exception passed through."""
    found = UNKNOWN
    while traceback is not None:
        frame = traceback.tb_frame
        if _is_users(frame):
            found = Source("", frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _is_users(frame: FrameType) -> bool:
    if frame.f_globals.get("__name__") in _API:
        return False
    name = frame.f_code.co_filename
    if name.startswith(_STDLIB) and not any(folder in name for folder in _PACKAGES):
        return False
    return not name.startswith((_TORCH, _OURS, "<")) and not name.endswith(_WRAPPERS)
