"""What this frontend uses of JAX beyond its documented interface. Tested with jax and jaxlib 0.10.2.

Private: `jax._src.source_info_util` (the user's frame of an equation), `_impl` of a key dtype. Extended or semi-public:
`jax.extend.core`, `jax.interpreters` (in boundary.py).
"""

import os
import re
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

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
    return tuple(name for name in scopes if name not in _JAX_SCOPES)


def source_of(eqn: JaxprEqn, outer: tuple[str, ...]) -> Source:
    """Where the user wrote an equation; `outer` are the scopes of the equation it is inlined into."""
    file, line = _user_line(eqn.source_info.traceback)
    return Source(".".join(outer + name_scopes(eqn)), file, line)


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


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl(dtype: Any) -> str:
    """The name of the implementation of a key dtype."""
    return str(dtype._impl.name)


def type_of_aval(aval: Any, where: object) -> TensorType:
    """The type that carries an abstract value; keys are u32[..., 2], float0 is bool. CaptureError where there is none."""
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
