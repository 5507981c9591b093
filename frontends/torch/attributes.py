"""What a model holds in plain attributes: tensors that are neither parameters nor buffers, and settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_SETTINGS = (bool, int, float, complex, str)
_REGISTERED = ("_parameters", "_buffers", "_modules")


def tensor_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of each, those in lists, tuples and dicts too."""
    for path, module in model.named_modules():
        for key, value in _attributes(module).items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield f"{path}.{key}" if path else key, leaf


def settings(model: nn.Module) -> dict[str, Any]:
    """The numbers and strings that its modules hold, by name."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _SETTINGS)
    }


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """What the model holds in attributes, lists and dicts of tensors, and settings, is afterwards as it was before."""
    before = [(m, {k: _copied(v) for k, v in vars(m).items()}) for m in model.modules()]
    try:
        yield
    finally:
        for module, kept in before:
            for key, value in list(_attributes(module).items()):
                if _holds_tensor(value) or _holds_tensor(kept.get(key)):
                    _put_back(module, key, value, kept)
            vars(module).update({k: v for k, v in kept.items() if isinstance(v, _SETTINGS)})


def _put_back(module: nn.Module, key: str, value: Any, kept: dict[str, Any]) -> None:
    if key not in kept:
        del vars(module)[key]
    elif value is kept[key]:
        return
    elif isinstance(value, list) and isinstance(kept[key], list):
        value[:] = kept[key]
    elif isinstance(value, dict) and isinstance(kept[key], dict):
        value.clear()
        value.update(kept[key])
    else:
        vars(module)[key] = kept[key]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        k: v
        for k, v in vars(module).items()
        if k not in _REGISTERED and isinstance(v, (Tensor, list, tuple, dict))
    }


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(x, Tensor) for x in pytree.tree_leaves(value))
