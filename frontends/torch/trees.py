"""Pytrees of torch with names of leaves: `batch["a"][0].b` is named `a.0.b`."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from plait.core_ir.errors import UsageError


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """`(name, leaf)` of every leaf, in order; UsageError when two have one name."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    named = [(_name(path), leaf) for path, leaf in leaves]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise UsageError(f"two leaves have the name {twice[0]!r}; use keys without dots")
    return named


def kind_of(x: Any) -> str:
    """What an object is, in words for a message."""
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    if type(x).__module__ == "builtins":
        return "None" if x is None else f"{_article(type(x).__name__)} {type(x).__name__}"
    return f"a {type(x).__module__}.{type(x).__qualname__}"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _name(path: Sequence[Any]) -> str:
    parts = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path)
    return ".".join(map(str, parts))
