"""Trees of named leaves: naming, flattening, checking, and the arrays that carry typed keys."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from plait.core_ir.arrays import array_type, is_array, is_torch, to_numpy
from plait.core_ir.errors import CaptureError, UsageError
from plait.core_ir.types import TensorType, c64, c128, f32, f64, i32, i64, u32, u64
from plait.frontends.jax.jaxpr import KEY_IMPL, abstract, is_key, type_of_aval, x64_enabled

_NARROWED = {i64: i32, u64: u32, f64: f32, c128: c64}


def leaf_name(path: Sequence[Any], root: str) -> str:
    """The name of a leaf by its key path; `root` where the tree is one leaf."""
    return keystr(tuple(path), simple=True, separator=".").removesuffix(".value") or root


def named_leaves(
    tree: Any, root: str, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """`[(name, leaf)]` and the tree's structure."""
    leaves, treedef = tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(leaf_name(path, root), leaf) for path, leaf in leaves], treedef


@dataclass(frozen=True)
class ArrayTree:
    """The structure of a tree whose arrays are ports and whose other leaves are part of the program.

    names, types: of the array leaves, in order; an array of typed keys is carried by u32[..., 2].
    avals: what JAX traces for each (with its weak type, or key dtype).
    static: the other leaves by position among all leaves.
    """

    root: str
    treedef: Any
    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    static: Mapping[int, Any]

    def pack(self, arrays: Mapping[str, Any]) -> Any:
        """The tree with these arrays, by name, and the static leaves."""
        return self.unflatten([arrays[name] for name in self.names])

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """The tree with these arrays, in order, and the static leaves."""
        rest = iter(arrays)
        total = len(self.names) + len(self.static)
        leaves = [self.static[i] if i in self.static else next(rest) for i in range(total)]
        return jax.tree.unflatten(self.treedef, leaves)

    def trace(self, carriers: Sequence[Any]) -> Any:
        """The tree the user's function gets: keys made of their carriers."""
        return self.unflatten(
            [
                jax.random.wrap_key_data(x, impl=KEY_IMPL) if is_key(aval.dtype) else x
                for x, aval in zip(carriers, self.avals, strict=True)
            ]
        )

    def flatten(self, tree: Any) -> dict[str, Any]:
        """Arrays by name of a tree of the same structure, as this one's types; UsageError where it differs."""
        leaves, treedef = named_leaves(tree, self.root)
        found = {name: leaf for i, (name, leaf) in enumerate(leaves) if i not in self.static}
        if treedef != self.treedef or tuple(found) != self.names:
            missing = [n for n in self.names if n not in found]
            extra = [n for n in found if n not in self.names]
            raise UsageError(
                f"{self.root}: the structure is not the one compiled for: missing {missing}, unexpected {extra}"
                + (
                    ""
                    if missing or extra
                    else f"; expected {_short(self.treedef)}, got {_short(treedef)}"
                )
            )
        return {
            name: _carrier(name, leaf, type)
            for (name, leaf), type in zip(found.items(), self.types, strict=True)
        }


def _carrier(name: str, leaf: Any, type: TensorType) -> Any:
    """The leaf as an array of that type: keys by their words, 64-bit NumPy arrays narrowed as JAX does."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise UsageError(f"{name!r} is abstract (a ShapeDtypeStruct): pass arrays with content")
    if not is_array(leaf):
        raise UsageError(f"{name!r}: expected an array {type}, got a {_class_of(leaf)}")
    if not is_torch(leaf) and is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    found = array_type(leaf)
    if found == type:
        return leaf
    if found.shape == type.shape and _NARROWED.get(found.dtype) == type.dtype:
        return to_numpy(leaf).astype(type.dtype.numpy)
    raise UsageError(f"{name!r}: compiled for {type}, got {found}")


def _short(treedef: object) -> str:
    text = str(treedef)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _class_of(x: object) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


def array_tree(
    tree: Any, root: str, *, x64: bool, static: bool, is_leaf: Callable[[Any], bool] | None = None
) -> ArrayTree:
    """The structure of a tree. `static`: leaves that are no arrays are allowed, and become part of the program."""
    leaves, treedef = named_leaves(tree, root, is_leaf)
    names, types, avals, rest = [], [], [], {}
    for position, (name, leaf) in enumerate(leaves):
        if is_array(leaf) and not is_torch(leaf):
            type, aval = _described(name, leaf, x64)
            names.append(name)
            types.append(type)
            avals.append(aval)
        elif static and not is_torch(leaf):
            rest[position] = leaf
        else:
            raise UsageError(
                f"{root}: leaf {name!r} is a {_class_of(leaf)}; every leaf must be an array of JAX or NumPy "
                "(close over static settings, make numbers arrays with jnp.asarray)"
            )
    doubled = sorted({n for n in names if names.count(n) > 1})
    if doubled:
        raise CaptureError(f"{root}: leaves {doubled} have one name twice; rename the keys")
    return ArrayTree(root, treedef, tuple(names), tuple(types), tuple(avals), rest)


def _described(name: str, leaf: Any, x64: bool) -> tuple[TensorType, jax.ShapeDtypeStruct]:
    weak = bool(getattr(getattr(leaf, "aval", leaf), "weak_type", False))
    aval = abstract(leaf.shape, leaf.dtype, weak=weak)
    type = type_of_aval(aval, f"leaf {name!r}")
    if not x64 and type.dtype in _NARROWED:
        type = type.with_dtype(_NARROWED[type.dtype])
        aval = abstract(leaf.shape, type.dtype.numpy, weak=weak)
    return type, aval


def needs_x64(model: Any, batch: Any) -> bool:
    """Whether to trace with 64-bit types: where the user turned them on, where the model holds 64-bit floats, or where
    either holds 64-bit arrays of JAX itself, which can be made in no other way. A batch of NumPy is narrowed.
    """
    if x64_enabled():
        return True
    held = [leaf for leaf in jax.tree.leaves(model) if _is_wide(leaf)]
    given = [leaf for leaf in jax.tree.leaves(batch) if _is_wide(leaf)]
    floats = any(leaf.dtype.kind in "fc" for leaf in held)
    return floats or any(isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) for x in (*held, *given))


def _is_wide(leaf: Any) -> bool:
    if not is_array(leaf) or is_torch(leaf) or is_key(leaf.dtype):
        return False
    return bool(np.dtype(leaf.dtype).itemsize >= 8 and leaf.dtype != np.complex64)
