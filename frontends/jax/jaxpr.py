"""What this frontend uses of JAX beyond its documented interface. Tested with jax and jaxlib 0.10.2.

Private: `jax._src.source_info_util` (the user's frame of an equation), `_impl` of a key dtype. Extended or semi-public:
`jax.extend.core`, `jax.interpreters` (in boundary.py), configuration values. Some of it is untyped; wrapped here.
"""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from plait.core_ir.errors import CaptureError
from plait.core_ir.graph import Source
from plait.core_ir.op import Array
from plait.core_ir.types import TensorType, bool_, dtype_of, u32

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var"]

KEY_IMPL = "threefry2x32"

_LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|equinox|numpy)[/\\]"
    rf"|^{re.escape(os.path.dirname(__file__))}"
)
# Scopes that JAX itself puts on the name stack.
_JAX_SCOPES = frozenset({"checkpoint", "rematted_computation", "while", "body", "cond"})


def is_user_file(file: str) -> bool:
    """Whether a file is the user's, rather than of JAX, of its libraries or of this frontend."""
    return source_info_util.is_user_filename(file) and not _LIBRARY.search(file)


@lru_cache(maxsize=4096)
def _user_line(traceback: Any) -> tuple[str, int]:
    for frame in source_info_util.user_frames(traceback):
        if not _LIBRARY.search(frame.file_name):
            return frame.file_name, frame.start_line
    return "", 0


def name_scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of the module scopes that an equation stands in, outermost first."""
    stack = eqn.source_info.name_stack.stack
    scopes = (e.name for e in stack if isinstance(e, source_info_util.Scope))
    return tuple(s for s in scopes if s not in _JAX_SCOPES and s.replace(".", "_").isidentifier())


def source_of(eqn: JaxprEqn, scopes: tuple[str, ...], outer: Source) -> Source:
    """Where the user wrote an equation; of `outer`, the equation it is inlined into, where that is unknown."""
    file, line = _user_line(eqn.source_info.traceback)
    return Source(".".join(scopes), file or outer.file, line or outer.line)


def jaxprs_of(eqn: JaxprEqn) -> list[ClosedJaxpr | Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    found = []
    for param in eqn.params.values():
        items = param if isinstance(param, (tuple, list)) else (param,)
        found += [item for item in items if isinstance(item, (ClosedJaxpr, Jaxpr))]
    return found


def closed(jaxpr: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    """A jaxpr that needs no constants as a closed one; a closed one as it is."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def as_function(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """The function of arrays that a jaxpr is."""
    function: Callable[..., list[Any]] = jaxpr_as_fun(jaxpr)
    return function


def abstract(shape: tuple[int, ...], dtype: Any, *, weak: bool = False) -> jax.ShapeDtypeStruct:
    """An array that has no content, to trace with."""
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)  # type: ignore[no-untyped-call]


def like(atom: Any) -> jax.ShapeDtypeStruct:
    """An array that has no content, as an operand of an equation is."""
    return abstract(atom.aval.shape, atom.aval.dtype)


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of an operand or a result of an equation."""
    shape: tuple[int, ...] = atom.aval.shape
    return shape


def x64_enabled() -> bool:
    """Whether the user has turned 64-bit types on."""
    return bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


def x64(enable: bool) -> AbstractContextManager[None]:
    """A context with 64-bit types on or off."""
    context: AbstractContextManager[None] = jax.enable_x64(enable)
    return context


def threefry_partitionable() -> bool:
    """Whether random bits are those of partitionable threefry."""
    return bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]


def is_key_atom(atom: Any) -> bool:
    """Whether an operand or a result of an equation is an array of keys."""
    return is_key(atom.aval.dtype)


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl(dtype: Any) -> str:
    """The name of the implementation of a key dtype."""
    return str(dtype._impl.name)


def type_of_aval(aval: Any, where: object) -> TensorType:
    """The type that carries an abstract value: u32[..., 2] for keys, bool for float0. CaptureError where none does."""
    shape = tuple(int(d) for d in aval.shape)
    if is_key(aval.dtype):
        if key_impl(aval.dtype) != KEY_IMPL:
            raise CaptureError(
                f"{where}: keys of implementation {key_impl(aval.dtype)!r} are not captured, their bits differ by "
                f"backend; make keys with jax.random.key(seed, impl={KEY_IMPL!r})"
            )
        return TensorType(u32, (*shape, 2))
    if aval.dtype == jax.dtypes.float0:
        return TensorType(bool_, shape)
    try:
        return TensorType(dtype_of(aval.dtype), shape)
    except (KeyError, TypeError):
        raise CaptureError(
            f"{where}: a value of dtype {aval.dtype} has no counterpart in Plait's types; convert it with astype"
        ) from None


def content_of(constant: Any, type: TensorType) -> Array:
    """The content of a constant of a jaxpr as an array of that type."""
    if hasattr(constant, "dtype") and is_key(constant.dtype):
        constant = jax.random.key_data(constant)
    return np.asarray(constant).astype(type.dtype.numpy).reshape(type.shape)
