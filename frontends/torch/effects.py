"""Changes that a captured program would miss, refused where they are made or would be read.

A marker copies, where in eager code it is the tensor itself: a tensor that went in and the one that came out are twins,
and when one is changed in place, a later read of the other would miss it. A tensor held outside parameters and buffers
is a constant: a change of it would be lost, and what a forward leaves in it is not there in the next. So is a number in
an attribute, which must be the same after a forward as before.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Source
from plait.frontends.torch.attributes import settings, tensor_attributes
from plait.frontends.torch.dtensors import local_part
from plait.frontends.torch.sources import calling_source


@dataclass(frozen=True)
class _Change:
    """A change in place: the op, where, and the cut that made the twins."""

    op: str
    source: Source
    cut: str


class Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op of a forward, and raises CaptureError at a change, or a read, that the program would miss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._twins: dict[StorageWeakRef, set[StorageWeakRef]] = {}
        self._cuts: dict[StorageWeakRef, str] = {}
        self._stale: dict[StorageWeakRef, _Change] = {}
        self._left: dict[StorageWeakRef, str] = {}
        self._settings: dict[str, Any] | None = None
        self._params: dict[StorageWeakRef, str] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """It only looks."""
        return True

    @contextmanager
    def watching(self, held: Mapping[str, Tensor]) -> Iterator[None]:
        """A forward of the model, from its start; `held` are its parameters and buffers, real ones for an eager run."""
        self._twins.clear()
        self._cuts.clear()
        self._stale.clear()
        if all(map(_is_outside, held.values())):
            yield
            return
        params = (name for name, _ in self._model.named_parameters() if name in held)
        self._params = {_storage(held[name]): name for name in params}
        with self:
            yield
        self._finish(held)

    def join(self, given: Sequence[Tensor], marked: Sequence[Tensor], cut: str) -> None:
        """`marked` came out of a marker for `given`."""
        for before, after in zip(given, marked, strict=True):
            old, new = _storage(before), _storage(after)
            group = self._twins.setdefault(old, {old})
            group.add(new)
            self._twins[new] = group
            self._cuts[new] = self._cuts[old] = cut

    def _finish(self, held: Mapping[str, Tensor]) -> None:
        for name, tensor in held.items():
            change = self._stale.get(_storage(tensor))
            if change is not None:
                raise _missed(f"{name!r} of the model", change)
        for name, tensor in tensor_attributes(self._model):
            if not _is_outside(tensor):
                self._left[_storage(tensor)] = name
        self._check_settings()

    def _check_settings(self) -> None:
        """CaptureError for a number that each forward changes; one that the first alone sets is a cache."""
        after = settings(self._model)
        before, self._settings = self._settings or after, after
        changed = [
            name for name in after if name in before and repr(after[name]) != repr(before[name])
        ]
        if changed:
            name = changed[0]
            raise CaptureError(
                f"the forward changes attribute {name!r}, from {before[name]!r} to {after[name]!r}, which a captured "
                "step would not repeat; make it a tensor and a buffer of the model: register_buffer"
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._stale or self._left:
            self._check_reads(func, (args, kwargs))
        if func._schema.is_mutable:
            self._note_changes(func, args, kwargs)
        return func(*args, **kwargs)

    def _check_reads(self, func: Any, arguments: Any) -> None:
        for storage in map(_storage, _tensors(arguments)):
            if storage in self._stale:
                raise _missed(f"{calling_source()} ({func})", self._stale[storage])
            if storage in self._left:
                raise CaptureError(
                    f"{calling_source()}: {func} reads {self._left[storage]!r}, a tensor that an earlier forward left "
                    "in a plain attribute; state that lasts from one microbatch to the next must be a buffer: "
                    "register_buffer"
                )

    def _note_changes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for tensor in _changed(func, args, kwargs):
            if _is_outside(tensor):
                names = [n for n, x in tensor_attributes(self._model) if x is tensor]
                what = f"{names[0]!r}, a plain attribute" if names else "a tensor outside the model"
                raise CaptureError(
                    f"{calling_source()}: {func} changes {what} of shape {list(tensor.shape)} in place, which a "
                    "captured step would not repeat; state must be a buffer of the model: register_buffer"
                )
            storage = _storage(tensor)
            if storage in self._params:
                raise CaptureError(
                    f"{calling_source()}: {func} changes parameter {self._params[storage]!r} in place; a captured step "
                    "may change buffers only: make it a buffer, or change it outside the loss"
                )
            for twin in self._twins.get(storage, set()) - {storage}:
                self._stale[twin] = _Change(str(func), calling_source(), self._cuts[storage])


def _missed(reader: str, change: _Change) -> CaptureError:
    return CaptureError(
        f"{change.source}: {change.op} changes in place a tensor that crosses the stage boundary {change.cut}; "
        f"{reader} reads it on the other side of that boundary, where it is a copy and the change would be missed. Use "
        "the op that is not in place (such as nn.ReLU(inplace=False), x = x * 2), or move the cut"
    )


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op changes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(given)


def _is_outside(tensor: Tensor) -> bool:
    """Whether it has content, unlike all that the program makes."""
    return type(local_part(tensor)) in (Tensor, nn.Parameter, nn.Buffer)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(local_part(tensor).untyped_storage())  # type: ignore[no-untyped-call]
