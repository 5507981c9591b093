"""PyTorch and Flax models with converted weights give the same loss and gradients."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from flax import nnx

import plait.models.weights.flax as flax_weights
import plait.models.weights.torch as torch_weights
from plait.core_ir.numerics import gradient_errors, relative_error
from plait.models.deepseek_v3 import config as deepseek_v3_config
from plait.models.deepseek_v3 import convert as deepseek_v3_convert
from plait.models.deepseek_v3 import flax as deepseek_v3_flax
from plait.models.deepseek_v3 import torch as deepseek_v3_torch
from plait.models.llama import config as llama_config
from plait.models.llama import convert as llama_convert
from plait.models.llama import flax as llama_flax
from plait.models.llama import torch as llama_torch
from plait.models.mlp import config as mlp_config
from plait.models.mlp import convert as mlp_convert
from plait.models.mlp import flax as mlp_flax
from plait.models.mlp import torch as mlp_torch

LOSS_TOLERANCE = 1e-6
GRAD_TOLERANCE = 1e-5
BF16_TOLERANCE = 2e-2

Arrays = dict[str, npt.NDArray[np.generic]]
Case = tuple["Family", Any]


@dataclass(frozen=True)
class Family:
    """The four files of a model's folder."""

    config: ModuleType
    convert: ModuleType
    flax: ModuleType
    torch: ModuleType


deepseek_v3 = Family(deepseek_v3_config, deepseek_v3_convert, deepseek_v3_flax, deepseek_v3_torch)
llama = Family(llama_config, llama_convert, llama_flax, llama_torch)
mlp = Family(mlp_config, mlp_convert, mlp_flax, mlp_torch)
DEEPSEEK_V3 = deepseek_v3_config.CONFIGS["tiny"]
LLAMA = llama_config.CONFIGS["tiny"]
CASES = {
    "mlp": (mlp, mlp.config.CONFIGS["tiny"]),
    "llama": (llama, LLAMA),
    "llama tied": (llama, replace(LLAMA, tied_head=True)),
    "llama one kv head": (llama, replace(LLAMA, num_kv_heads=1, num_layers=1)),
    "deepseek_v3": (deepseek_v3, DEEPSEEK_V3),
    "deepseek_v3 plain queries, no groups": (
        deepseek_v3,
        replace(DEEPSEEK_V3, q_lora_rank=None, num_groups=1, top_groups=1, num_layers=2),
    ),
    "deepseek_v3 dropped tokens": (deepseek_v3, replace(DEEPSEEK_V3, capacity_factor=0.75)),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def example(family: Family, config: Any) -> tuple[torch.nn.Module, Any, Arrays]:
    """Both models with the same weights, and a batch."""
    torch_model, flax_model = family.torch.build(config), family.flax.build(config)
    weights = torch_weights.read(torch_model)
    flax_weights.write(flax_model, family.convert.to_flax(weights))
    return torch_model, flax_model, next(family.config.batches(config, "train", 4, seed=0))


def test_loss_and_gradients_are_those_of_the_other_framework(
    case: Case,
) -> None:
    family, config = case
    torch_model, flax_model, batch = example(family, config)

    loss = family.torch.loss_fn(torch_model, {k: torch.from_numpy(v) for k, v in batch.items()})
    loss.backward()
    expected = {name: p.grad.numpy() for name, p in torch_model.named_parameters()}
    flax_loss, flax_grads = loss_and_grads(family, flax_model, batch)
    grads = family.convert.to_torch(flax_grads)

    assert relative_error(flax_loss, loss.item()) <= LOSS_TOLERANCE
    for name, error in gradient_errors(grads, expected).items():
        assert error <= GRAD_TOLERANCE, name


def loss_and_grads(family: Family, model: nnx.Module, batch: Arrays) -> tuple[Any, Arrays]:
    """Of a Flax model; its buffers stay."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params: Any) -> Any:
        return family.flax.loss_fn(nnx.merge(graph, params, rest, copy=True), batch)

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params)
    return np.asarray(loss), flax_weights.read(nnx.merge(graph, grads, rest, copy=True))


@pytest.mark.parametrize(
    ("family", "config"),
    [(llama, LLAMA), (deepseek_v3, DEEPSEEK_V3)],
    ids=["llama", "deepseek_v3"],
)
def test_cast_models_compute_in_their_own_dtype(family: Family, config: Any) -> None:
    torch_model, flax_model, batch = example(family, config)
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    torch_model.bfloat16()
    flax_model = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        flax_model,
    )
    assert torch_model(tensors["tokens"]).dtype == torch.bfloat16
    assert flax_model(batch["tokens"]).dtype == jnp.bfloat16
    loss = family.torch.loss_fn(torch_model, tensors).item()
    assert abs(float(family.flax.loss_fn(flax_model, batch)) - loss) <= BF16_TOLERANCE * loss


def test_conversion_round_trip_is_bitwise(case: Case) -> None:
    family, config = case
    torch_model, flax_model, _ = example(family, config)
    weights = torch_weights.read(torch_model)
    there = flax_weights.read(flax_model)
    back = family.convert.to_torch(there)
    assert there.keys() == family.convert.to_flax(weights).keys()
    assert back.keys() == weights.keys()
    for name, array in weights.items():
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes(), name


def test_seeds_decide_the_weights(case: Case) -> None:
    family, config = case
    for side, weights in ((family.torch, torch_weights), (family.flax, flax_weights)):
        first, again, other = (weights.read(side.build(config, seed)) for seed in (1, 1, 2))
        name = next(name for name, array in first.items() if array.ndim > 1)
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])


@pytest.mark.parametrize("family", [deepseek_v3, llama, mlp], ids=["deepseek_v3", "llama", "mlp"])
def test_boundary_is_called_before_the_layers_of_the_cuts(family: Family) -> None:
    config = family.config.CONFIGS["tiny"]
    model = family.flax.build(config)
    batch = next(family.config.batches(config, "train", 2, seed=0))
    seen: list[tuple[int, ...]] = []

    def boundary(x: jax.Array) -> jax.Array:
        seen.append(x.shape)
        return x

    cuts = config.cuts(4)
    loss = family.flax.loss_fn(model, batch, cuts=cuts, boundary=boundary)
    assert cuts == (1, 2, 3)
    assert len(seen) == 3
    assert {shape[-1] for shape in seen} == {config.dim}
    assert loss == family.flax.loss_fn(model, batch)


def test_tied_head_is_one_parameter() -> None:
    config = replace(LLAMA, tied_head=True)
    torch_model, flax_model, _ = example(llama, config)
    assert torch_model.head.weight is torch_model.tok_embed.weight
    names = flax_weights.read(flax_model).keys()
    assert "tok_embed.embedding" in names
    assert not any(name.startswith("head") for name in names)


def test_global_generator_is_left_alone(case: Case) -> None:
    family, config = case
    state = torch.random.get_rng_state()
    family.torch.build(config, seed=3)
    assert torch.equal(state, torch.random.get_rng_state())


def test_write_refuses_other_names() -> None:
    config = mlp.config.CONFIGS["tiny"]
    for side, weights in ((mlp.torch, torch_weights), (mlp.flax, flax_weights)):
        model = side.build(config)
        arrays = weights.read(model)
        arrays["extra"] = arrays.pop("layers.0.w1")
        with pytest.raises(ValueError, match=r"names differ: \['extra', 'layers.0.w1'\]"):
            weights.write(model, arrays)


def test_largest_config_builds_without_memory() -> None:
    config = llama.config.CONFIGS["7b"]
    with torch.device("meta"):
        model = llama.torch.build(config)
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 heads do not share 3 kv heads"):
        replace(LLAMA, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"dim 66 is not an even head size times 4 heads"):
        replace(LLAMA, dim=66)
    with pytest.raises(ValueError, match=r"num_layers must be at least 1"):
        replace(mlp.config.CONFIGS["tiny"], num_layers=0)
