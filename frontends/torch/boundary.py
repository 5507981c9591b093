"""Markers between stages: one op over every tensor that passes, called by the user or before a named module.

The order of execution decides the index of a cut. While nothing is captured, `stage_boundary` is the identity.
"""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from plait.core_ir.errors import CaptureError, UsageError
from plait.core_ir.graph import Source
from plait.frontends.torch.aot import in_backward, in_transform
from plait.frontends.torch.checkpoint import keep_cut, next_cut
from plait.frontends.torch.dtensors import like, local_part
from plait.frontends.torch.effects import Effects
from plait.frontends.torch.sources import calling_source

Tree = TypeVar("Tree")


@torch.library.custom_op("plait::boundary", mutates_args=())
def mark(xs: list[Tensor], index: int, backward: bool) -> list[Tensor]:
    """A copy of each tensor: stage `index` ends here (backward: the cotangents at the same cut)."""
    return [x.clone() for x in xs]


@mark.register_fake
def _(xs: list[Tensor], index: int, backward: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


MARK = torch.ops.plait.boundary.default
has_side_effect(MARK)  # a marker stays where nothing behind it is used


class _Marker(torch.autograd.Function):
    """Marks tensors on the way forward and the cotangents they have on the way back.

    NOTE: an autograd.Function rather than the op's own formula, since a tensor that needs no gradient must not come out
    needing one: it would be given a cotangent, and a message.
    """

    @staticmethod
    def forward(ctx: Any, index: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.index = index
        ctx.set_materialize_grads(False)
        marked = _marked(xs, index, False)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(m for m, n in zip(marked, needed, strict=True) if not n))
        return tuple(marked)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [g for g in grads if g is not None]
        marked = iter(_marked(present, ctx.index, True) if present else ())
        return (None, *(None if g is None else next(marked) for g in grads))


def _marked(xs: Sequence[Tensor], index: int, backward: bool) -> list[Tensor]:
    """Each tensor marked; of DTensors their local parts."""
    parts = mark([local_part(x) for x in xs], index, backward)
    return [like(part, x) for part, x in zip(parts, xs, strict=True)]


class Marks:
    """The cuts met while one forward runs."""

    def __init__(self, effects: Effects) -> None:
        self.num_cuts = 0
        self._effects = effects
        self._calls: dict[str, Source] = {}

    def restart(self) -> None:
        """Forget what was met: the forward runs again from its start."""
        self.num_cuts = 0
        self._calls.clear()

    def cut(self, tree: Tree, path: str = "") -> Tree:
        """Mark every tensor of the tree at the next cut, which stands before the module `path`, if not ""."""
        tensors = _tensors(tree)
        if in_transform():
            raise CaptureError(
                f"{calling_source(path)}: a stage boundary inside a transform of torch.func (vmap, grad, ...), whose "
                "stages cannot be told apart; call it outside the transform"
            )
        if not tensors:
            where = calling_source()
            raise CaptureError(
                f"{where}: a stage boundary got no tensor, so nothing tells what lies behind it; pass "
                "the activations of the model through it"
            )
        marked = _Marker.apply(self.num_cuts, *tensors)  # type: ignore[no-untyped-call]
        keep_cut(marked)
        place = f"before {path!r}" if path else f"at {calling_source()}"
        self._effects.join(tensors, marked, place)
        self.num_cuts += 1
        return _with_tensors(tree, marked)

    def met(self, path: str) -> None:
        """Note that the module of a split path is called; CaptureError the second time."""
        here = calling_source(path)
        if path in self._calls:
            raise CaptureError(
                f"split: module {path!r} is called more than once, at {self._calls[path]} and at {here}, so "
                "a cut before it is not one place; call plait.stage_boundary where the cut is meant"
            )
        self._calls[path] = here

    def require_met(self, paths: Sequence[str]) -> None:
        """CaptureError if the module of a path was never called."""
        never = [path for path in paths if path not in self._calls]
        if never:
            raise CaptureError(
                f"split: the loss never calls {', '.join(map(repr, never))} (a container such as ModuleList is not "
                "called itself; name one of the modules in it)"
            )


def cross_again(tree: Tree) -> Tree:
    """The tree at a cut that a recomputation meets: what crossed there in the forward, from which it goes on."""
    crossed = next_cut()
    if crossed is None:
        return tree
    pairs = zip(crossed, _tensors(tree), strict=True)
    # copies, since a leaf of autograd could not be changed in place
    return _with_tensors(
        tree, [c.detach().requires_grad_(x.requires_grad).clone() for c, x in pairs]
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _with_tensors(tree: Tree, tensors: Sequence[Tensor]) -> Tree:
    """The tree with these in place of its tensors."""
    given = iter(tensors)
    result: Tree = pytree.tree_map_only(Tensor, lambda _: next(given), tree)
    return result


_marks: ContextVar[Marks | None] = ContextVar("plait_torch_marks", default=None)


def stage_boundary(tree: Tree) -> Tree:
    """The same tree; while captured, a stage ends here: every tensor in it crosses to the next stage."""
    marks = _marks.get()
    if marks is None:
        return tree
    return cross_again(tree) if in_backward() else marks.cut(tree)


@contextmanager
def marking(model: nn.Module, paths: Sequence[str], marks: Marks) -> Iterator[None]:
    """Inside, `stage_boundary` marks, and so does every call of a module named by `paths`."""
    handles = [_cut_before(_module(model, path), path, marks) for path in _checked(paths)]
    token = _marks.set(marks)
    try:
        yield
    finally:
        _marks.reset(token)
        for handle in handles:
            handle.remove()


def _checked(paths: Sequence[str]) -> Sequence[str]:
    if isinstance(paths, str) or not all(isinstance(p, str) for p in paths):
        raise UsageError(f"split: expected a sequence of module paths, got {paths!r}")
    twice = sorted({p for p in paths if list(paths).count(p) > 1})
    if twice:
        raise UsageError(f"split: {', '.join(map(repr, twice))} stands in the list more than once")
    return paths


def _module(model: nn.Module, path: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    del modules[""]
    if path in modules:
        return modules[path]
    near = difflib.get_close_matches(path, modules, n=5, cutoff=0.5)
    raise UsageError(
        f"split: the model ({type(model).__qualname__}) has no module {path!r}; near matches: "
        f"{', '.join(near) or 'none (model.named_modules() lists them)'}"
    )


def _cut_before(module: nn.Module, path: str, marks: Marks) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_backward():
            return cross_again((args, kwargs))
        marks.met(path)
        return marks.cut((args, kwargs), path)

    return module.register_forward_pre_hook(hook, with_kwargs=True)
