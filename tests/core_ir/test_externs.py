"""Callables of externs: found by target and spec, in the process that registered them."""

import pytest

from plait.core_ir.errors import UnsupportedError
from plait.core_ir.externs import lookup, register


def test_the_first_callable_of_a_target_and_spec_stays() -> None:
    register("jax:test_externs", "{}", lambda x: (x + 1,))
    register("jax:test_externs", "{}", lambda x: (x + 2,))
    register("jax:test_externs", '{"n": 3}', lambda x: (x + 3,))
    assert lookup("jax:test_externs", "{}")(1) == (2,)
    assert lookup("jax:test_externs", '{"n": 3}')(1) == (4,)


def test_an_unknown_callable_says_where_to_capture() -> None:
    with pytest.raises(UnsupportedError, match=r"'jax:unheard_of' was captured in another process"):
        lookup("jax:unheard_of", "{}")
