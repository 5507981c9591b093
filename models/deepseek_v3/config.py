"""Sizes of DeepSeek-V3, and the text it learns."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from plait.models import text
from plait.models.sizes import check_sizes, share


@dataclass(frozen=True)
class Config:
    """Sizes, each with its name in the paper (arXiv 2412.19437, sections 2.1 and 4.2) or in published checkpoints.

    The first `num_dense_layers` layers have a gated MLP of `hidden_dim`; the others have `num_shared_experts` experts
    for every token and `top_k` of `num_experts` routed ones, all of `moe_hidden_dim`.

    q_lora_rank: of the compressed queries; None: queries are not compressed.
    num_groups, top_groups: a token's experts are chosen within its `top_groups` best of `num_groups` equal groups.
    routed_scaling_factor: what the normalised weights of a token's routed experts add up to.
    capacity_factor: None: an expert has a slot for every token, so that no token is dropped whatever the router does;
        else it has `capacity_factor` times the slots that equal loads fill, and later tokens are dropped.
    """

    vocab_size: int
    dim: int
    hidden_dim: int
    moe_hidden_dim: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    seq_len: int
    num_groups: int = 1
    top_groups: int = 1
    routed_scaling_factor: float = 1.0
    capacity_factor: float | None = None
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(self, may_be_none=("num_dense_layers", "num_shared_experts"))
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"rotary head size {self.qk_rope_head_dim} is odd")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"{self.num_dense_layers} of {self.num_layers} layers cannot be dense")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not form {self.num_groups} equal groups"
            )
        group_size = self.num_experts // self.num_groups
        if self.num_groups > 1 and group_size < 2:
            raise ValueError("a group has the score of its best two experts, and here it has one")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"{self.top_groups} of {self.num_groups} groups cannot be chosen")
        if not 1 <= self.top_k <= self.top_groups * group_size:
            raise ValueError(
                f"{self.top_k} experts do not stand in {self.top_groups} groups of {group_size}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor {self.capacity_factor} is not above 0")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def capacity(self, num_tokens: int) -> int:
        """The slots of each expert for `num_tokens` tokens; a token takes at most one of them."""
        if self.capacity_factor is None:
            return num_tokens
        equal_load = num_tokens * self.top_k / self.num_experts
        return min(num_tokens, math.ceil(self.capacity_factor * equal_load))

    def check_mesh(self, axes: Mapping[str, int]) -> None:
        """ValueError where the ranks of the axis "expert" would not have equally many experts."""
        share(self.num_experts, axes.get("expert", 1), "experts")

    def cuts(self, num_stages: int) -> tuple[int, ...]:
        """The layers before which to cut for `num_stages` stages of even length."""
        return tuple(i * self.num_layers // num_stages for i in range(1, num_stages))


CONFIGS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(
            vocab_size=text.VOCAB_SIZE,
            dim=64,
            hidden_dim=160,
            moe_hidden_dim=32,
            num_layers=4,
            num_dense_layers=1,
            num_heads=4,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            num_experts=8,
            num_shared_experts=1,
            top_k=2,
            num_groups=4,
            top_groups=2,
            routed_scaling_factor=2.5,
            seq_len=32,
        ),
        "small": Config(
            vocab_size=text.VOCAB_SIZE,
            dim=512,
            hidden_dim=1376,
            moe_hidden_dim=352,
            num_layers=8,
            num_dense_layers=1,
            num_heads=8,
            q_lora_rank=None,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            num_experts=16,
            num_shared_experts=1,
            top_k=4,
            num_groups=4,
            top_groups=2,
            routed_scaling_factor=2.5,
            seq_len=256,
        ),
        # The sizes of DeepSeek-V2-Lite (arXiv 2405.04434, appendix B, and its checkpoint's config.json), with the
        # router of DeepSeek-V3 in place of its softmax and balance losses.
        "16b": Config(
            vocab_size=102_400,
            dim=2048,
            hidden_dim=10_944,
            moe_hidden_dim=1408,
            num_layers=27,
            num_dense_layers=1,
            num_heads=16,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            num_experts=64,
            num_shared_experts=2,
            top_k=6,
            seq_len=4096,
        ),
        # DeepSeek-V3 (arXiv 2412.19437, section 4.2, and its checkpoint's config.json), without the module that
        # predicts a further token, and at the length it was first trained at, which needs no stretched positions.
        "671b": Config(
            vocab_size=129_280,
            dim=7168,
            hidden_dim=18_432,
            moe_hidden_dim=2048,
            num_layers=61,
            num_dense_layers=3,
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            num_experts=256,
            num_shared_experts=1,
            top_k=8,
            num_groups=8,
            top_groups=4,
            routed_scaling_factor=2.5,
            seq_len=4096,
        ),
    }
)


def batches(config: Config, split: text.Split, batch_size: int, seed: int) -> Iterator[text.Batch]:
    """Endless batches {"tokens": i32[B, T], "targets": i32[B, T]} of bytes of real text."""
    return text.batches(split, batch_size, config.seq_len, seed)
