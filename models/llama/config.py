"""Sizes of Llama, and the text it learns."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from plait.models import text
from plait.models.sizes import check_sizes, share

WHOLE_AXES = ("tensor", "context")
"""What axes are called over which the model is cut, and each rank is given the whole batch."""


@dataclass(frozen=True)
class Config:
    """Sizes; `tied_head` uses the token embedding as the output head."""

    vocab_size: int
    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied_head: bool = False

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim {self.dim} is not an even head size times {self.num_heads} heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} kv heads")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def check_mesh(self, axes: Mapping[str, int]) -> None:
        """ValueError where what is cut does not divide over the ranks of the axes "tensor" and "context"."""
        tensor = axes.get("tensor", 1)
        share(self.num_kv_heads, tensor, "key-value heads")
        share(self.hidden_dim, tensor, "hidden dims")
        share(self.vocab_size, tensor, "words of the vocabulary")
        share(self.seq_len, axes.get("context", 1), "positions")

    def cuts(self, num_stages: int) -> tuple[int, ...]:
        """The layers before which to cut for `num_stages` stages of even length."""
        return tuple(i * self.num_layers // num_stages for i in range(1, num_stages))


CONFIGS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(
            vocab_size=text.VOCAB_SIZE,
            dim=64,
            hidden_dim=160,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            seq_len=64,
        ),
        "small": Config(
            vocab_size=text.VOCAB_SIZE,
            dim=512,
            hidden_dim=1376,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            seq_len=256,
        ),
        "7b": Config(
            vocab_size=32_000,
            dim=4096,
            hidden_dim=11_008,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            seq_len=4096,
        ),
    }
)


def batches(config: Config, split: text.Split, batch_size: int, seed: int) -> Iterator[text.Batch]:
    """Endless batches {"tokens": i32[B, T], "targets": i32[B, T]} of bytes of real text."""
    return text.batches(split, batch_size, config.seq_len, seed)
