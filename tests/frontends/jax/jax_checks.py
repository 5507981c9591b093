"""Helpers: lower a function of JAX and run it with the NumPy interpreter, against JAX itself.

from jax_checks import Case, check
"""

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plait.core_ir.build import Builder
from plait.core_ir.graph import Graph
from plait.core_ir.interpret import interpret, interpret_by_name
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.core_ir.types import dtype_of
from plait.core_ir.verify import verify
from plait.frontends.captured import Captured
from plait.frontends.jax.capture import capture
from plait.frontends.jax.jaxpr import jaxprs_of, type_of_aval
from plait.frontends.jax.lower import lower_jaxpr
from plait.frontends.jax.marks import Marks
from plait.frontends.jax.reference import named_gradients

TOLERANCE = {"f64": 1e-11, "c128": 1e-11, "f32": 1e-5, "c64": 1e-5, "f16": 2e-3, "bf16": 2e-2}
"""Relative, by dtype; anything else is exact."""


@dataclass(frozen=True)
class Case:
    """A function and its arguments; `primitive` must stand in its jaxpr."""

    primitive: str
    name: str
    function: Callable[..., Any]
    args: Sequence[Any]

    def __str__(self) -> str:
        return f"{self.primitive}-{self.name}"


def random(shape: Sequence[int], dtype: Any = "f4", low: float = -3, high: float = 3) -> Any:
    """Numbers of any dtype between two bounds; each place that calls has its own, always the same."""
    caller = sys._getframe(1)
    code = caller.f_code
    place = f"{Path(code.co_filename).name}:{code.co_qualname}:{caller.f_lasti}:{shape}:{dtype}"
    rng = np.random.default_rng(zlib.crc32(place.encode()))
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if kind in "iu":
        least = max(int(low), 0) if kind == "u" else int(low)
        return rng.integers(least, int(high) + 1, shape).astype(dtype)
    x = rng.uniform(low, high, shape)
    return (x + 1j * rng.uniform(low, high, shape) if kind == "c" else x).astype(dtype)


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function's results and its cotangents for given ones: `(cotangents, *args)`."""

    def both(cotangent: Any, *args: Any) -> Any:
        out, pullback = jax.vjp(function, *args)
        return out, pullback(cotangent)

    return both


def lower(function: Callable[..., Any], *args: Any) -> Graph:
    """The lowered jaxpr of a function, verified."""
    jaxpr = jax.make_jaxpr(function)(*args)
    b = Builder("f")
    inputs = [b.input(type_of_aval(aval, "input")) for aval in jaxpr.in_avals]
    for value in lower_jaxpr(b, jaxpr, inputs, Marks(cuts=lambda path: not path)):
        b.output(value)
    graph = b.build()
    verify(graph)
    return graph


def carrier(x: Any) -> Any:
    """An array as NumPy; keys by their words."""
    is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def primitives(jaxpr: Any) -> Iterator[str]:
    """Names of all primitives in a jaxpr, nested ones too."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn.primitive.name
        for inner in jaxprs_of(eqn):
            yield from primitives(inner)


def check(function: Callable[..., Any], *args: Any, primitive: str = "") -> Graph:
    """The interpreted graph gives what JAX gives; `primitive` stands in the jaxpr and no extern in the graph."""
    with jax.enable_x64(True):
        if primitive:
            assert primitive in set(primitives(jax.make_jaxpr(function)(*args)))
        graph = lower(function, *args)
        assert all(eqn.op.name != "extern" for eqn in graph.eqns)
        expected = [carrier(x) for x in jax.tree.leaves(jax.jit(function)(*args))]
        found = interpret(graph, [carrier(x) for x in jax.tree.leaves(args)])
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert_close(got, want)
    return graph


def assert_close(got: Any, want: Any) -> None:
    """Equal within the tolerance of the dtype, NaN and infinities in the same places."""
    tolerance = TOLERANCE.get(dtype_of(want.dtype).name)
    if tolerance is None:
        np.testing.assert_array_equal(got, want)
        return
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=tolerance, atol=tolerance)


def run(
    captured: Captured, batch: Any, key: Sequence[int] = (0, 7), cotangent: float = 1.0
) -> dict[tuple[str, str], Any]:
    """Outputs by (role, name) of the interpreted joint graph, on the first microbatch."""
    held = captured.read_leaves()
    operands = {(leaf.role, leaf.name): carrier(held[leaf.name]) for leaf in captured.leaves}
    first = captured.batch.microbatches(captured.flatten_batch(batch))[0]
    operands |= {("batch", name): np.asarray(x) for name, x in first.items()}
    operands["rng_key", ""] = np.array(key, np.uint32)
    graph = captured.graph
    verify(graph)
    for port, value in zip(graph.input_ports, graph.inputs, strict=True):
        if port.role == "loss_grad":
            operands["loss_grad", ""] = np.array(cotangent, value.type.dtype.numpy)
    return interpret_by_name(graph, operands)


def check_step(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    loss: Any,
    grads: Any,
    dtype: str = "f32",
    **options: Any,
) -> Captured:
    """The captured step gives this loss and these gradients, within the tolerances of the framework itself."""
    options = {"num_microbatches": 1, "split": None, **options}
    captured = capture(loss_fn, model, batch, **options)
    out = run(captured, batch)
    assert "extern" not in {eqn.op.name for eqn in captured.graph.eqns}
    allowed = tolerance(dtype, "framework")
    assert relative_error(out["loss", ""], np.asarray(loss)) <= allowed.loss
    types = {leaf.name: leaf.type for leaf in captured.leaves if leaf.trainable}
    found = {n: out.get(("param_grad", n), np.zeros(t.shape)) for n, t in types.items()}
    assert gradient_error(found, named_gradients(grads)) <= allowed.grads
    return captured


def marks(captured: Captured) -> list[tuple[int, str, int]]:
    """`(index, direction, number of operands)` of each boundary in order."""
    return [
        (eqn.attrs["index"], "backward" if eqn.attrs["backward"] else "forward", len(eqn.operands))
        for eqn in captured.graph.eqns
        if eqn.op.name == "boundary"
    ]
