"""`split` by module path in flax.linen: a cut before each module; one clear error for a path that is none."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax_checks import check_step, marks, random

from plait.core_ir.errors import CaptureError, UsageError
from plait.frontends.jax.boundary import stage_boundary
from plait.frontends.jax.capture import capture

X = random((4, 6))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any, scale: float = 1.0) -> Any:
        x = nn.Dense(6, name="up")(x) * mask
        return jnp.tanh(stage_boundary(x)) * scale


class Net(nn.Module):
    remat: bool = False

    def setup(self) -> None:
        block = nn.remat(Block) if self.remat else Block
        self.layers = [block() for _ in range(3)]
        self.shared = nn.Dense(6)
        self.idle = nn.Dense(6)

    def __call__(self, x: Any) -> Any:
        mask = jnp.ones((6,), jnp.int32)
        for layer in self.layers:
            x = layer(x, mask)
        return self.shared(self.shared(x))


VARIABLES = Net().init(jax.random.key(0), X)


def loss(variables: Any, x: Any) -> Any:
    return jnp.mean(Net().apply(variables, x) ** 2)


def test_a_cut_stands_before_each_module_over_all_its_arguments() -> None:
    expected = jax.value_and_grad(loss)(VARIABLES, X)
    captured = check_step(loss, VARIABLES, X, *expected, split=["layers_2", "layers_1"])
    assert captured.num_cuts == 2
    assert marks(captured) == [
        (0, "forward", 2),
        (1, "forward", 2),
        (1, "backward", 1),
        (0, "backward", 1),
    ]


def test_a_cut_inside_a_module() -> None:
    expected = jax.value_and_grad(loss)(VARIABLES, X)
    check_step(loss, VARIABLES, X, *expected, split=["layers_1.up"])


def test_without_paths_the_calls_of_the_model_cut() -> None:
    assert capture(loss, VARIABLES, X, num_microbatches=2, split=None).num_cuts == 3


def test_a_cut_before_a_recomputed_module() -> None:
    def recomputed(variables: Any, x: Any) -> Any:
        return jnp.mean(Net(remat=True).apply(variables, x) ** 2)

    variables = Net(remat=True).init(jax.random.key(0), X)
    expected = jax.value_and_grad(recomputed)(variables, X)
    captured = check_step(recomputed, variables, X, *expected, split=["layers_1"])
    assert [(index, direction) for index, direction, _ in marks(captured)] == [
        (0, "forward"),
        (0, "backward"),
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layer_1", r"never calls a module 'layer_1'; called are .*layers_1"),
        ("idle", r"never calls a module 'idle'"),
        ("shared", r"'shared' is called 2 times"),
    ],
)
def test_a_path_that_is_no_cut(path: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(loss, VARIABLES, X, num_microbatches=1, split=["layers_1", path])


def test_a_path_twice() -> None:
    with pytest.raises(UsageError, match=r"names \['layers_1'\] twice"):
        capture(loss, VARIABLES, X, num_microbatches=1, split=["layers_1", "layers_1"])


@pytest.mark.parametrize("split", ["layers_1", 2, [1]])
def test_a_split_of_another_type(split: Any) -> None:
    with pytest.raises(UsageError, match="split must be None or a sequence of module paths"):
        capture(loss, VARIABLES, X, num_microbatches=1, split=split)


def test_paths_in_nnx_and_plain_functions_say_what_to_do() -> None:
    model = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    for kind in (model, {"w": X.T}):
        with pytest.raises(
            UsageError, match=r"call plait\.stage_boundary\(x\) where a stage begins"
        ):
            capture(lambda m, x: jnp.mean(x), kind, X, num_microbatches=1, split=["layers.1"])
