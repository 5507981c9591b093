"""What an emitter is: the function that turns one equation into lax operations on traced arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax

from plait.core_ir.graph import Eqn, Graph
from plait.core_ir.op import Op
from plait.core_ir.types import DType, dtype_of

Emitter: TypeAlias = Callable[[Eqn, Sequence[jax.Array]], Sequence[jax.Array]]
"""`emitter(eqn, operands) -> results`, traceable under jit."""

Table: TypeAlias = Mapping[Op, Emitter]

Emit: TypeAlias = Callable[[Graph], Callable[..., tuple[jax.Array, ...]]]
"""The emitter of whole graphs, handed to the rules of ops that hold graphs."""


def one(function: Callable[..., Any]) -> Emitter:
    """The emitter of an op with one result: `function(*operands, **attrs)`."""
    return lambda eqn, operands: (function(*operands, **eqn.attrs),)


def many(function: Callable[..., Any]) -> Emitter:
    """The emitter of an op with several results: `function(*operands, **attrs)` gives all of them."""
    return lambda eqn, operands: tuple(function(*operands, **eqn.attrs))


def cast(x: jax.Array, dtype: DType | np.dtype[Any]) -> jax.Array:
    """x in another dtype; x itself when it has it."""
    wanted = dtype.numpy if isinstance(dtype, DType) else dtype
    return x if x.dtype == wanted else lax.convert_element_type(x, wanted)


def is_narrow(x: jax.Array) -> bool:
    """Whether x holds floats of 8 or 16 bits, whose arithmetic is done in f32."""
    dtype = dtype_of(x.dtype)
    return dtype.kind == "float" and dtype.itemsize <= 2


def widen(x: jax.Array) -> jax.Array:
    """x in the dtype its arithmetic is done in: f32 for narrow floats, else its own."""
    return cast(x, np.dtype(np.float32)) if is_narrow(x) else x


def wide(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function with narrow floats computed in f32 and rounded once; a result of another kind stays as it is."""

    def apply(*operands: jax.Array, **attrs: Any) -> jax.Array:
        if not is_narrow(operands[0]):
            return function(*operands, **attrs)
        out = function(*map(widen, operands), **attrs)
        return cast(out, operands[0].dtype) if out.dtype == np.float32 else out

    return apply
