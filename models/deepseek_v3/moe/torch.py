"""Mixture of experts in PyTorch.

Shapes: N tokens, D model dim, H hidden dim of an expert, E experts, K experts of a token, C slots of an expert.

Shapes follow from sizes alone, so memory and work do not depend on the routing: a layer holds E C rows, of D before its
experts, of 3 H within and of D after. By default C = N: were all N tokens to choose the same K experts, none would be
dropped, and this costs, whatever they choose, E / K times the rows and the work that equal loads need. With
`capacity_factor` f (C = f N K / E) it is f times, and tokens beyond an expert's slots are dropped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from plait.models.deepseek_v3.config import Config

BALANCE_SPEED = 0.001
"""By how much a step moves the bias of an expert (arXiv 2412.19437, section 4.2)."""


def stay(x: Tensor) -> Tensor:
    """The identity: every expert is where the tokens are."""
    return x


def own_part(x: Tensor) -> Tensor:
    """What this rank has of weights that lie over several."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class Exchange:
    """How slots get to where their experts are, and back. Within one device they stay.

    to_experts: f[E, C, D], the slots that the tokens of this rank fill -> f[E / R, R C, D], what R ranks have for the
        experts of this one: an all-to-all that cuts dim 0 and joins dim 1.
    to_tokens: the inverse.
    total: i32[E], the loads of the experts by the tokens of this rank -> by those of R ranks.
    """

    to_experts: Callable[[Tensor], Tensor] = stay
    to_tokens: Callable[[Tensor], Tensor] = stay
    total: Callable[[Tensor], Tensor] = stay


LOCAL = Exchange()


class Router(nn.Module):
    """f[N, D] -> the experts of each token and their weights, i64[N, K] and f32[N, K]; computed in f32.

    bias: f32[E], added to the scores for the choice alone, never for the weights; `end_step` moves it.
    counts: i32[E], how many tokens chose each expert since the last `end_step`; a forward in training mode adds to it.
    """

    bias: Tensor
    counts: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.num_experts, bias=False)
        self.register_buffer("bias", torch.zeros(config.num_experts))
        self.register_buffer("counts", torch.zeros(config.num_experts, dtype=torch.int32))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(tokens.float(), self.gate.weight.float()))
        return route(scores, self.bias, self.config)


class Experts(nn.Module):
    """A gated MLP for each expert, [E, C, D] -> [E, C, D]; of the experts that this rank has."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        inwards = config.num_experts, config.dim, config.moe_hidden_dim
        self.w1 = nn.Parameter(torch.empty(inwards))
        self.w2 = nn.Parameter(torch.empty(inwards).mT.contiguous())
        self.w3 = nn.Parameter(torch.empty(inwards))

    def forward(self, slots: Tensor) -> Tensor:
        w1, w2, w3 = (own_part(w) for w in (self.w1, self.w2, self.w3))
        return (F.silu(slots @ w1) * (slots @ w3)) @ w2


class MoE(nn.Module):
    """What a token's routed experts add up to, [B, T, D] -> [B, T, D]; each token is routed by itself."""

    def __init__(self, config: Config, exchange: Exchange = LOCAL) -> None:
        super().__init__()
        self.config = config
        self.exchange = exchange
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chosen, weights = self.router(tokens)
        capacity = self.config.capacity(len(tokens))
        places, counts = place(chosen, self.config.num_experts, capacity)
        if self.training:
            self.router.counts.add_(self.exchange.total(counts))
        slots = dispatch(tokens, places, self.config.num_experts, capacity)
        slots = self.experts(self.exchange.to_experts(slots))
        return combine(self.exchange.to_tokens(slots), places, weights).view_as(x)


def route(scores: Tensor, bias: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The experts of each token, the best first, and their weights; f32[N, E], f32[E] -> i64[N, K], f32[N, K].

    Experts are chosen by `scores + bias` within the token's best groups, the score of a group being the sum of its best
    two. Of equals the first is chosen, for groups too. Weights are the chosen `scores` over their sum, times
    `routed_scaling_factor`.
    """
    chosen = _choose((scores + bias).detach(), config)
    picked = scores.gather(1, chosen)
    return chosen, picked / (picked.sum(1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def place(chosen: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Where the tokens go among the E C slots, in order of tokens, and the load of each expert.

    i64[N, K] -> i64[N, K], i32[E]. A token that finds its expert's slots full is dropped there: its place is E C. The
    counts include it.
    """
    shape = chosen.shape[0], num_experts
    assigned = torch.zeros(shape, dtype=torch.int32, device=chosen.device).scatter(1, chosen, 1)
    earlier = (assigned.cumsum(0, dtype=torch.int32) - assigned).gather(1, chosen)
    places = torch.where(earlier < capacity, chosen * capacity + earlier, num_experts * capacity)
    return places, assigned.sum(0, dtype=torch.int32)


def dispatch(tokens: Tensor, places: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Each token in its slots; [N, D], i64[N, K] -> [E, C, D]. Empty slots are 0."""
    copies = tokens[:, None].expand(-1, places.shape[1], -1).flatten(0, 1)
    table = tokens.new_zeros(num_experts * capacity + 1, tokens.shape[1])  # the last is dropped
    table = table.index_put((places.flatten(),), copies)
    return table[:-1].reshape(num_experts, capacity, -1)


def combine(slots: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's slots; [E, C, D], i64[N, K], f32[N, K] -> [N, D]. Dropped ones count as 0."""
    table = slots.flatten(0, 1)
    weights = torch.where(places < len(table), weights, 0.0)
    rows = table[places.clamp(max=len(table) - 1)]
    return (rows.float() * weights[..., None]).sum(1).to(slots.dtype)


def update_bias(bias: Tensor, counts: Tensor, speed: float = BALANCE_SPEED) -> Tensor:
    """The bias for the next step: `bias + speed * sign(mean(counts) - counts)`, the sign being exact.

    counts: the tokens that chose each expert, summed over the microbatches of a step.
    """
    total = counts.sum()
    mean, rest = total // len(counts), total % len(counts)
    below = (counts < mean) | ((counts == mean) & (rest > 0))
    return bias + speed * (below.to(bias.dtype) - (counts > mean).to(bias.dtype))


def end_step(model: nn.Module, speed: float = BALANCE_SPEED) -> None:
    """Moves the bias of every router in `model` by the counts of this step, in place, and sets the counts to 0.

    To be called once a step, after its last microbatch. Where several ranks train on parts of a batch, add up their
    counts before. A model cast to 16 bits rounds its bias, and with it moves that are small beside it.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.bias.copy_(update_bias(module.bias, module.counts, speed))
            module.counts.zero_()


def _choose(corrected: Tensor, config: Config) -> Tensor:
    if config.num_groups > 1:
        grouped = corrected.reshape(len(corrected), config.num_groups, -1)
        group_scores = _best(grouped, 2)[0].sum(-1)
        _, groups = _best(group_scores, config.top_groups)
        numbers = torch.arange(config.num_groups, device=groups.device)
        is_open = (groups[:, :, None] == numbers).any(1)
        corrected = grouped.masked_fill(~is_open[:, :, None], -math.inf).flatten(1)
    return _best(corrected, config.top_k)[1]


def _best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dim in order, and where they stand; of equals the first, unlike `torch.topk`."""
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], places[..., :k]
