"""A model that counts what it sees, in buffers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NUM_MICROBATCHES = 4
X = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
SPLIT = [f"layers.{n}" for n in (1, 2, 3)]


class Counting(nn.Module):
    """Counts rows, and in each column how many entries are above 0."""

    rows: Tensor
    above: Tensor
    weighed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("rows", torch.tensor(100))
        self.register_buffer("above", torch.arange(3, dtype=torch.int32))
        self.register_buffer("weighed", torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        self.above += (x > 0).sum(0, dtype=torch.int32)
        self.weighed.add_((x > 0).sum(0), alpha=2)
        return self.linear(x).tanh()  # type: ignore[no-any-return]


class CountingStack(nn.Module):
    """Four layers, by a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Counting() for _ in range(4)))


def torch_loss(model: Any, x: Tensor) -> Tensor:
    return model.layers(x).square().mean()  # type: ignore[no-any-return]


def check_counts(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """AssertionError unless the buffers are the same, by name."""
    assert found.keys() == wanted.keys()
    for name, count in wanted.items():
        np.testing.assert_array_equal(found[name], count, err_msg=name)
