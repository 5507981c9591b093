"""The gated MLP in PyTorch.

Weights are [in, out] and products are `x @ w`, as in Flax: both capture to the same graph.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.mlp.config import Config


class GatedMLP(nn.Module):
    """f32[B, D] -> f32[B, D]: (silu(x w1) * (x w3)) w2."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = _weight(config.dim, config.hidden_dim)
        self.w2 = _weight(config.hidden_dim, config.dim)
        self.w3 = _weight(config.dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return (F.silu(x @ self.w1) * (x @ self.w3)) @ self.w2


class MLP(nn.Module):
    """`num_layers` gated MLPs in a row."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedMLP(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(config: Config, seed: int = 0) -> MLP:
    """A model with weights drawn from `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MLP(config)


def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean squared error of {"x": f32[B, D], "y": f32[B, D]}, a scalar."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def _weight(num_in: int, num_out: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_in, num_out) / num_in**0.5)
