"""Sizes of the gated MLP, and the regression task it learns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from plait.models.sizes import check_sizes
from plait.models.text import Split


@dataclass(frozen=True)
class Config:
    """`num_layers` gated MLPs in a row: dim -> hidden_dim -> dim."""

    dim: int
    hidden_dim: int
    num_layers: int

    def __post_init__(self) -> None:
        check_sizes(self)

    def cuts(self, num_stages: int) -> tuple[int, ...]:
        """The layers before which to cut for `num_stages` stages of even length."""
        return tuple(i * self.num_layers // num_stages for i in range(1, num_stages))


CONFIGS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(dim=32, hidden_dim=64, num_layers=4),
        "small": Config(dim=512, hidden_dim=1376, num_layers=8),
        "7b": Config(dim=4096, hidden_dim=11008, num_layers=32),
    }
)


def batches(
    config: Config, split: Split, batch_size: int, seed: int
) -> Iterator[dict[str, npt.NDArray[np.float32]]]:
    """Endless batches {"x": f32[B, D], "y": f32[B, D]} of one fixed function; splits never meet."""
    teacher = np.random.default_rng(0).standard_normal((config.dim, config.dim))
    rng = np.random.default_rng([seed, split == "held_out"])
    while True:
        x = rng.standard_normal((batch_size, config.dim))
        y = np.tanh(x @ teacher / np.sqrt(config.dim))
        yield {"x": x.astype(np.float32), "y": y.astype(np.float32)}
