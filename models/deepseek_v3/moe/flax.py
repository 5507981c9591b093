"""Mixture of experts in Flax nnx.

Shapes: N tokens, D model dim, H hidden dim of an expert, E experts, K experts of a token, C slots of an expert.

Shapes follow from sizes alone, so memory and work do not depend on the routing: a layer holds E C rows, of D before its
experts, of 3 H within and of D after. By default C = N: were all N tokens to choose the same K experts, none would be
dropped, and this costs, whatever they choose, E / K times the rows and the work that equal loads need. With
`capacity_factor` f (C = f N K / E) it is f times, and tokens beyond an expert's slots are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from plait.models.deepseek_v3.config import Config

INIT_STD = 0.02
BALANCE_SPEED = 0.001
"""By how much a step moves the bias of an expert (arXiv 2412.19437, section 4.2)."""


def stay(x: Array) -> Array:
    """The identity: every expert is where the tokens are."""
    return x


@dataclass(frozen=True)
class Exchange:
    """How slots get to where their experts are, and back. Within one device they stay.

    to_experts: f[E, C, D], the slots that the tokens of this rank fill -> f[E / R, R C, D], what R ranks have for the
        experts of this one: an all-to-all that cuts dim 0 and joins dim 1.
    to_tokens: the inverse.
    total: i32[E], the loads of the experts by the tokens of this rank -> by those of R ranks.
    """

    to_experts: Callable[[Array], Array] = stay
    to_tokens: Callable[[Array], Array] = stay
    total: Callable[[Array], Array] = stay


LOCAL = Exchange()


class Buffer(nnx.Variable[Array]):
    """State of the model that is not trained."""


class Router(nnx.Module):
    """f[N, D] -> the experts of each token and their weights, i32[N, K] and f32[N, K]; computed in f32.

    bias: f32[E], added to the scores for the choice alone, never for the weights; `end_step` moves it.
    counts: i32[E], how many tokens chose each expert since the last `end_step`; a forward in training mode adds to it.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.gate = nnx.Linear(
            config.dim,
            config.num_experts,
            use_bias=False,
            kernel_init=nnx.initializers.normal(INIT_STD),
            rngs=rngs,
        )
        self.bias = Buffer(jnp.zeros(config.num_experts))
        self.counts = Buffer(jnp.zeros(config.num_experts, jnp.int32))

    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        logits = tokens.astype(jnp.float32) @ self.gate.kernel[...].astype(jnp.float32)
        return route(jax.nn.sigmoid(logits), self.bias[...], self.config)


class Experts(nnx.Module):
    """A gated MLP for each expert, [E, C, D] -> [E, C, D]."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        inwards = config.num_experts, config.dim, config.moe_hidden_dim
        outwards = config.num_experts, config.moe_hidden_dim, config.dim
        self.w1 = nnx.Param(rngs.params.normal(inwards) * INIT_STD)
        self.w2 = nnx.Param(rngs.params.normal(outwards) * INIT_STD)
        self.w3 = nnx.Param(rngs.params.normal(inwards) * INIT_STD)

    def __call__(self, slots: Array) -> Array:
        return (jax.nn.silu(slots @ self.w1[...]) * (slots @ self.w3[...])) @ self.w2[...]


class MoE(nnx.Module):
    """What a token's routed experts add up to, [B, T, D] -> [B, T, D]; each token is routed by itself.

    training: whether a forward counts the tokens of each expert; `model.set_attributes(training=False)` ends it.
    """

    def __init__(self, config: Config, exchange: Exchange = LOCAL, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.exchange = exchange
        self.training = True
        self.router = Router(config, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(tokens)
        capacity = self.config.capacity(len(tokens))
        places, counts = place(chosen, self.config.num_experts, capacity)
        if self.training:
            self.router.counts[...] = self.router.counts[...] + self.exchange.total(counts)
        slots = dispatch(tokens, places, self.config.num_experts, capacity)
        slots = self.experts(self.exchange.to_experts(slots))
        return combine(self.exchange.to_tokens(slots), places, weights).reshape(x.shape)


def route(scores: Array, bias: Array, config: Config) -> tuple[Array, Array]:
    """The experts of each token, the best first, and their weights; f32[N, E], f32[E] -> i32[N, K], f32[N, K].

    Experts are chosen by `scores + bias` within the token's best groups, the score of a group being the sum of its best
    two. Of equals the first is chosen, for groups too. Weights are the chosen `scores` over their sum, times
    `routed_scaling_factor`.
    """
    chosen = _choose(jax.lax.stop_gradient(scores + bias), config)
    picked = _take(scores, chosen)
    total = picked.sum(1, keepdims=True) + 1e-20
    return chosen, picked / total * config.routed_scaling_factor


def place(chosen: Array, num_experts: int, capacity: int) -> tuple[Array, Array]:
    """Where the tokens go among the E C slots, in order of tokens, and the load of each expert.

    i32[N, K] -> i32[N, K], i32[E]. A token that finds its expert's slots full is dropped there: its place is E C. The
    counts include it.
    """
    assigned = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32).sum(1)
    earlier = _take(jnp.cumsum(assigned, 0) - assigned, chosen)
    places = jnp.where(earlier < capacity, chosen * capacity + earlier, num_experts * capacity)
    return places, assigned.sum(0)


def dispatch(tokens: Array, places: Array, num_experts: int, capacity: int) -> Array:
    """Each token in its slots; [N, D], i32[N, K] -> [E, C, D]. Empty slots are 0."""
    num_tokens, dim = tokens.shape
    copies = jnp.broadcast_to(tokens[:, None], (num_tokens, places.shape[1], dim))
    table = jnp.zeros((num_experts * capacity, dim), tokens.dtype)
    # No two add to one slot: unlike that of `set`, the gradient of `add` is a plain gather.
    table = table.at[places.reshape(-1)].add(copies.reshape(-1, dim), mode="drop")
    return table.reshape(num_experts, capacity, dim)


def combine(slots: Array, places: Array, weights: Array) -> Array:
    """The weighted sum of each token's slots; [E, C, D], i32[N, K], f32[N, K] -> [N, D]. Dropped ones count as 0."""
    table = slots.reshape(-1, slots.shape[-1])
    weights = jnp.where(places < len(table), weights, 0.0)
    rows = table.at[places].get(mode="clip")
    return (rows.astype(jnp.float32) * weights[..., None]).sum(1).astype(slots.dtype)


def update_bias(bias: Array, counts: Array, speed: float = BALANCE_SPEED) -> Array:
    """The bias for the next step: `bias + speed * sign(mean(counts) - counts)`, the sign being exact.

    counts: the tokens that chose each expert, summed over the microbatches of a step.
    """
    total = counts.sum()
    mean, rest = total // len(counts), total % len(counts)
    below = (counts < mean) | ((counts == mean) & (rest > 0))
    return bias + speed * (below.astype(bias.dtype) - (counts > mean).astype(bias.dtype))


def end_step(model: nnx.Module, speed: float = BALANCE_SPEED) -> None:
    """Moves the bias of every router in `model` by the counts of this step, in place, and sets the counts to 0.

    To be called once a step, after its last microbatch. Where several ranks train on parts of a batch, add up their
    counts before. A model cast to 16 bits rounds its bias, and with it moves that are small beside it.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router):
            module.bias[...] = update_bias(module.bias[...], module.counts[...], speed)
            module.counts[...] = jnp.zeros_like(module.counts[...])


def _choose(corrected: Array, config: Config) -> Array:
    if config.num_groups > 1:
        grouped = corrected.reshape(len(corrected), config.num_groups, -1)
        group_scores = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, groups = jax.lax.top_k(group_scores, config.top_groups)
        is_open = (groups[:, :, None] == jnp.arange(config.num_groups)).any(1)
        grouped = jnp.where(is_open[:, :, None], grouped, -jnp.inf)
        corrected = grouped.reshape(corrected.shape)
    return jax.lax.top_k(corrected, config.top_k)[1]


def _take(x: Array, columns: Array) -> Array:
    """[N, E], i32[N, K] -> [N, K]: some columns of each row."""
    return jnp.take_along_axis(x, columns, 1, mode="promise_in_bounds")
