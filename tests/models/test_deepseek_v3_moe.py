"""DeepSeek-V3's mixture of experts against loops over tokens and experts in NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec

import plait.models.weights.flax as flax_weights
import plait.models.weights.torch as torch_weights
from plait.models.deepseek_v3 import convert
from plait.models.deepseek_v3.config import CONFIGS, Config
from plait.models.deepseek_v3.moe import flax as moe_flax
from plait.models.deepseek_v3.moe import torch as moe_torch

Array = npt.NDArray[Any]

GROUPED = CONFIGS["tiny"]
PLAIN = replace(GROUPED, num_groups=1, top_groups=1, top_k=3)
RNG = np.random.default_rng


@dataclass(frozen=True)
class Side:
    """One framework's file of the mixture of experts."""

    moe: ModuleType

    def array(self, x: Array) -> Any:
        return torch.from_numpy(x) if self.moe is moe_torch else jnp.asarray(x)

    def build(self, config: Config, weights: dict[str, Array]) -> Any:
        """A mixture of experts with these weights, by torch's names."""
        if self.moe is moe_torch:
            module = moe_torch.MoE(config)
            torch_weights.write(module, weights)
            return module
        flax_module = moe_flax.MoE(config, rngs=nnx.Rngs(0))
        flax_weights.write(flax_module, convert.to_flax(weights))
        return flax_module


def numpy(x: Any) -> Array:
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


@pytest.fixture(params=[moe_torch, moe_flax], ids=["torch", "flax"])
def side(request: pytest.FixtureRequest) -> Side:
    return Side(request.param)


# Routing.


def first_best(scores: Sequence[float], count: int) -> list[int]:
    """The places of the `count` largest, one after the other; of equals the first."""
    left, found = list(range(len(scores))), []
    for _ in range(count):
        best = left[0]
        for place in left:
            if scores[place] > scores[best]:
                best = place
        left.remove(best)
        found.append(best)
    return found


def routed(scores: Array, bias: Array, config: Config) -> tuple[Array, Array]:
    """Experts and weights, token by token."""
    size = config.num_experts // config.num_groups
    all_chosen, all_weights = [], []
    for row in scores:
        corrected = [float(s + b) for s, b in zip(row, bias, strict=True)]
        groups = [corrected[g * size : (g + 1) * size] for g in range(config.num_groups)]
        open_groups = list(range(config.num_groups))
        if config.num_groups > 1:
            group_scores = [sum(group[i] for i in first_best(group, 2)) for group in groups]
            open_groups = sorted(first_best(group_scores, config.top_groups))
        open_experts = [g * size + i for g in open_groups for i in range(size)]
        best = first_best([corrected[e] for e in open_experts], config.top_k)
        chosen = [open_experts[i] for i in best]
        total = sum(float(row[e]) for e in chosen)
        all_chosen.append(chosen)
        all_weights.append([config.routed_scaling_factor * float(row[e]) / total for e in chosen])
    return np.array(all_chosen), np.array(all_weights)


def check_routing(side: Side, scores: Array, bias: Array, config: Config) -> Array:
    chosen, weights = side.moe.route(side.array(scores), side.array(bias), config)
    expected, expected_weights = routed(scores, bias, config)
    np.testing.assert_array_equal(numpy(chosen), expected)
    np.testing.assert_allclose(numpy(weights), expected_weights, rtol=1e-6)
    return numpy(chosen)


@pytest.mark.parametrize("config", [GROUPED, PLAIN], ids=["groups", "no groups"])
def test_routing(side: Side, config: Config) -> None:
    scores = RNG(0).uniform(0.1, 0.9, (50, 8)).astype(np.float32)
    bias = RNG(1).normal(scale=0.2, size=8).astype(np.float32)
    chosen = check_routing(side, scores, bias, config)
    assert not np.array_equal(chosen, routed(scores, np.zeros(8), config)[0])


@pytest.mark.parametrize("config", [GROUPED, PLAIN], ids=["groups", "no groups"])
def test_of_equal_experts_and_groups_the_first_are_chosen(side: Side, config: Config) -> None:
    """Scores of three values, exact sums: almost every token has ties."""
    scores = (RNG(2).integers(1, 4, (200, 8)) / 4).astype(np.float32)
    check_routing(side, scores, np.zeros(8, np.float32), config)
    equal = np.full((3, 8), 0.5, np.float32)
    chosen = check_routing(side, equal, np.zeros(8, np.float32), config)
    assert chosen.tolist() == [list(range(config.top_k))] * 3


def test_a_group_counts_by_its_best_two(side: Side) -> None:
    """Group 3 has the best expert, but groups 0 and 2 have the better pairs."""
    scores = np.array([[0.6, 0.5, 0.1, 0.2, 0.5, 0.7, 0.9, 0.1]], np.float32)
    assert check_routing(side, scores, np.zeros(8, np.float32), GROUPED).tolist() == [[5, 0]]


def test_weights_have_a_gradient_and_the_choice_has_none() -> None:
    scores = torch.rand(4, 8, requires_grad=True)
    bias = torch.rand(8, requires_grad=True)
    chosen, weights = moe_torch.route(scores, bias, GROUPED)
    assert not chosen.requires_grad
    (scores_grad,) = torch.autograd.grad(weights[:, 0].sum(), scores, retain_graph=True)
    assert ((scores_grad != 0).sum(1) == GROUPED.top_k).all()
    (bias_grad,) = torch.autograd.grad(weights.sum(), bias, allow_unused=True)
    assert bias_grad is None


# Dispatch, experts, combination.


def moe_weights(config: Config, seed: int = 0) -> dict[str, Array]:
    module = moe_torch.MoE(config)
    rng = RNG(seed)
    return {
        name: rng.normal(scale=0.3, size=array.shape).astype(np.float32)
        for name, array in torch_weights.read(module).items()
    }


def mixed(config: Config, weights: dict[str, Array], bias: Array, tokens: Array) -> Any:
    """What comes out, the load of each expert, and the (token, expert) pairs that were dropped."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    scores = 1 / (1 + np.exp(-(tokens.astype(np.float64) @ w["router.gate.weight"].T)))
    chosen, shares = routed(scores.astype(np.float32), bias, config)
    room = config.capacity(len(tokens))
    loads = [0] * config.num_experts
    out, dropped = np.zeros(tokens.shape), set()
    for n, x in enumerate(tokens.astype(np.float64)):
        for e, share in zip(chosen[n], shares[n], strict=True):
            loads[e] += 1
            if loads[e] > room:
                dropped.add((n, int(e)))
                continue
            gate = x @ w["experts.w1"][e]
            hidden = gate / (1 + np.exp(-gate)) * (x @ w["experts.w3"][e])
            out[n] += share * (hidden @ w["experts.w2"][e])
    return out, loads, dropped


def check_mixture(side: Side, config: Config, weights: dict[str, Array], bias: Array) -> Any:
    x = RNG(5).normal(size=(2, 12, config.dim)).astype(np.float32)
    module = side.build(config, weights)
    if side.moe is moe_torch:
        module.router.bias.copy_(torch.from_numpy(bias))
    else:
        module.router.bias[...] = jnp.asarray(bias)
    found = numpy(module(side.array(x))).reshape(24, -1)
    expected, loads, dropped = mixed(config, weights, bias, x.reshape(24, -1))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert numpy(module.router.counts[...]).tolist() == loads
    return loads, dropped


@pytest.mark.parametrize("config", [GROUPED, PLAIN], ids=["groups", "no groups"])
def test_mixture(side: Side, config: Config) -> None:
    loads, dropped = check_mixture(side, config, moe_weights(config), np.zeros(8, np.float32))
    assert sum(loads) == 24 * config.top_k
    assert not dropped


def test_no_token_is_dropped_where_all_choose_the_same_experts(side: Side) -> None:
    bias = np.array([0, 9, 0, 0, 0, 0, 9, 0], np.float32)
    loads, dropped = check_mixture(side, GROUPED, moe_weights(GROUPED), bias)
    assert loads == [0, 24, 0, 0, 0, 0, 24, 0]
    assert not dropped


def test_beyond_the_capacity_the_later_tokens_are_dropped(side: Side) -> None:
    config = replace(GROUPED, capacity_factor=1.5)
    assert config.capacity(24) == 9  # 1.5 * 24 * 2 / 8
    bias = np.array([0, 9, 0, 0, 0, 0, 9, 0], np.float32)
    _, dropped = check_mixture(side, config, moe_weights(config), bias)
    assert dropped == {(n, e) for n in range(9, 24) for e in (1, 6)}
    _, dropped = check_mixture(side, config, moe_weights(config), np.zeros(8, np.float32))
    assert 0 < len(dropped) < 24


def test_capacity() -> None:
    assert GROUPED.capacity(100) == 100
    assert replace(GROUPED, capacity_factor=1.0).capacity(100) == 25
    assert replace(GROUPED, capacity_factor=1.01).capacity(100) == 26
    assert replace(GROUPED, capacity_factor=9.0).capacity(100) == 100


def test_places(side: Side) -> None:
    chosen = np.array([[2, 0], [2, 1], [0, 2], [2, 1]], np.int64)
    places, counts = side.moe.place(side.array(chosen), 3, 2)
    # Expert 0 has slots 0 and 1, expert 1 has 2 and 3, expert 2 has 4 and 5; 6 is none.
    assert numpy(places).tolist() == [[4, 0], [5, 2], [1, 6], [6, 3]]
    assert numpy(counts).tolist() == [2, 2, 4]
    tokens = np.array([[1], [2], [3], [4]], np.float32)
    slots = side.moe.dispatch(side.array(tokens), places, 3, 2)
    assert numpy(slots).tolist() == [[[1], [3]], [[2], [4]], [[1], [2]]]
    out = side.moe.combine(slots, places, side.array(np.full((4, 2), 0.5, np.float32)))
    assert numpy(out).tolist() == [[1], [2], [1.5], [2]]


def test_experts_spread_over_an_axis_compute_the_same() -> None:
    """Tokens and experts on two devices, slots exchanged by all-to-all, gradients too."""
    config = replace(GROUPED, capacity_factor=1.5)
    swap = partial(jax.lax.all_to_all, axis_name="expert", tiled=True)
    spread_out = moe_flax.Exchange(
        partial(swap, split_axis=0, concat_axis=1), partial(swap, split_axis=1, concat_axis=0)
    )
    weights = convert.to_flax(moe_weights(config))
    modules = [moe_flax.MoE(config, e, rngs=nnx.Rngs(0)) for e in (moe_flax.LOCAL, spread_out)]
    for module in modules:
        flax_weights.write(module, weights)
    x = jnp.asarray(RNG(7).normal(size=(4, 6, config.dim)), jnp.float32)

    def square(module: moe_flax.MoE, params: Any, rest: Any, x: Any) -> Any:
        merged = nnx.merge(nnx.graphdef(module), params, rest, copy=True)
        return jnp.square(merged(x)).sum()

    def on_axis(params: Any, rest: Any, x: Any) -> Any:
        return jax.lax.psum(square(modules[1], params, rest, x), "expert")

    _, params, rest = nnx.split(modules[1], nnx.Param, ...)
    specs = jax.tree.map_with_path(
        lambda path, _: PartitionSpec("expert") if "experts" in str(path) else PartitionSpec(),
        params,
    )
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(
        on_axis,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), PartitionSpec("expert")),
        out_specs=PartitionSpec(),
    )
    found, found_grads = jax.jit(jax.value_and_grad(spread))(params, rest, x)

    def in_halves(params: Any, rest: Any, x: Any) -> Any:
        return sum(square(modules[0], params, rest, half) for half in jnp.split(x, 2))

    expected, grads = jax.jit(jax.value_and_grad(in_halves))(params, rest, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))


# The balance of loads.


def test_the_bias_moves_by_the_sign_of_what_lacks_to_the_mean(side: Side) -> None:
    def updated(counts: list[int]) -> list[float]:
        bias = side.array(np.array([0.5, -0.25, 0.0, 1.0], np.float32))
        return numpy(side.moe.update_bias(bias, side.array(np.array(counts, np.int32)), 0.125))

    assert updated([3, 9, 6, 6]).tolist() == [0.625, -0.375, 0.0, 1.0]
    assert updated([6, 6, 6, 7]).tolist() == [0.625, -0.125, 0.125, 0.875]  # mean 6.25
    assert updated([0, 0, 0, 0]).tolist() == [0.5, -0.25, 0.0, 1.0]
    # Close to 2^29 each, where f32 has only every 32nd number.
    many = 2**29 - 3
    assert updated([many, many, many + 1, many - 1]).tolist() == [0.5, -0.25, -0.125, 1.125]


def test_counts_add_up_over_microbatches_until_the_step_ends(side: Side) -> None:
    module = side.build(GROUPED, moe_weights(GROUPED))
    halves = RNG(6).normal(size=(2, 1, 10, GROUPED.dim)).astype(np.float32)
    loads = np.zeros(8, np.int64)
    for half in halves:
        module(side.array(half))
        loads += mixed(GROUPED, moe_weights(GROUPED), np.zeros(8, np.float32), half[0])[1]
    assert numpy(module.router.counts[...]).tolist() == loads.tolist()
    side.moe.end_step(module, speed=0.5)
    assert not numpy(module.router.counts[...]).any()
    moved = 0.5 * np.sign(loads.mean() - loads)
    np.testing.assert_array_equal(numpy(module.router.bias[...]), moved.astype(np.float32))


def test_a_forward_counts_in_training_alone(side: Side) -> None:
    module = side.build(GROUPED, moe_weights(GROUPED))
    if side.moe is moe_torch:
        module.eval()
    else:
        module.set_attributes(training=False)
    module(side.array(np.ones((1, 3, GROUPED.dim), np.float32)))
    assert not numpy(module.router.counts[...]).any()


def test_steps_balance_the_loads() -> None:
    module = Side(moe_torch).build(PLAIN, moe_weights(PLAIN))
    x = torch.from_numpy(RNG(8).normal(loc=0.3, size=(4, 64, PLAIN.dim)).astype(np.float32))
    spreads = []
    for _ in range(200):
        with torch.no_grad():
            module(x)
        spreads.append(float(module.router.counts.float().std()))
        moe_torch.end_step(module, speed=0.01)
    assert np.mean(spreads[-20:]) < 0.25 * spreads[0]
