"""Compiled tasks: shared by structure, strict about types, refusing at compile time."""

import json

import jax
import numpy as np
import pytest

from plait.backends.jax.compile import compile_task
from plait.backends.jax.devices import devices_for
from plait.backends.jax.emit import emit
from plait.core_ir.build import Builder
from plait.core_ir.errors import UnsupportedError, UsageError
from plait.core_ir.externs import register
from plait.core_ir.graph import Graph, Source
from plait.core_ir.interpret import interpret
from plait.core_ir.ops import control, elementwise, linalg
from plait.core_ir.types import TensorType, bf16, f32, f64


def affine(name: str, hint: str, number: float = 3.0) -> Graph:
    b = Builder(name)
    x = b.input(TensorType(f32, (2, 3)), "activation", hint)
    b.output(b(elementwise.mul, x, b.full(x.type, number)), "activation", hint + "_out")
    return b.build()


def test_equal_graphs_share_one_artifact_whatever_their_names() -> None:
    first = compile_task(affine("left", "a"))
    second = compile_task(affine("right", "b"))
    third = compile_task(affine("left", "a", number=4.0))
    assert second.executable is first.executable
    assert second.compile_seconds == 0.0
    assert third.executable is not first.executable


def test_arguments_are_kept_and_the_result_is_right() -> None:
    graph = affine("kept", "x", number=0.5)
    x = jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3))
    (y,) = compile_task(graph)([x])
    np.testing.assert_array_equal(np.asarray(y), interpret(graph, [np.asarray(x)])[0])
    np.testing.assert_array_equal(np.asarray(x), np.arange(6, dtype=np.float32).reshape(2, 3))


def test_64_bit_types_need_no_global_flag() -> None:
    b = Builder("double")
    x = b.input(TensorType(f64, (3,)))
    b.output(b(elementwise.exp, x))
    graph = b.build()
    assert not jax.config.read("jax_enable_x64")
    with jax.enable_x64(True):
        operand = jax.device_put(np.linspace(0, 1, 3))
    (y,) = compile_task(graph)([operand])
    assert y.dtype == np.float64
    np.testing.assert_allclose(np.asarray(y), np.exp(np.linspace(0, 1, 3)), rtol=1e-14)


def test_a_conversion_rounds_even_where_it_is_converted_back() -> None:
    b = Builder("rounded")
    x = b.input(TensorType(f32, (1,)))
    b.output(b.convert(b.convert(x, bf16), f32))
    (y,) = compile_task(b.build())([jax.device_put(np.array([1.001], np.float32))])
    assert np.asarray(y)[0] == 1.0


def test_products_of_f32_are_not_reduced() -> None:
    b = Builder("product")
    x, y = (b.input(TensorType(f32, (4, 4))) for _ in range(2))
    b.output(b(linalg.dot_general, x, y, batch=((), ()), contract=((1,), (0,))))
    lowered = jax.jit(emit(b.build())).lower(*[np.zeros((4, 4), np.float32)] * 2).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in lowered


def _extern(target: str, spec: str) -> Graph:
    b = Builder("call")
    x = b.input(TensorType(f32, (2,)))
    with b.at(Source("model.head", "model.py", 12)):
        b.output(b(control.extern, x, target=target, results=(x.type,), spec=spec))
    return b.build()


def test_an_op_of_torch_is_refused_at_compile_time_with_the_users_line() -> None:
    with pytest.raises(
        UnsupportedError, match=r"model\.head model\.py:12.*torch:aten\.foo\.default"
    ):
        compile_task(_extern("torch:aten.foo.default", "{}"))


def test_an_extern_of_jax_runs_what_was_registered() -> None:
    spec = json.dumps({"case": "test_compile"})
    register("jax:twice", spec, lambda x: (x * 2,))
    (y,) = compile_task(_extern("jax:twice", spec))([jax.device_put(np.ones(2, np.float32))])
    np.testing.assert_array_equal(np.asarray(y), [2, 2])


def test_an_extern_that_this_process_does_not_know_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="captured in another process"):
        compile_task(_extern("jax:unknown", "{}"))


def test_more_ranks_than_devices_says_how_to_get_them() -> None:
    with pytest.raises(UsageError, match="xla_force_host_platform_device_count=99"):
        devices_for(99)
