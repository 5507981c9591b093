"""DeepSeek-V3 in PyTorch.

Shapes: B batch, T time, D model dim, N heads, L latent dim, Q head dim of queries and keys, P its rotary part, V head
dim of values.

Rotary positions turn the two halves of a head's rotary part, not its even and odd entries as published checkpoints do:
to load one, bring the rotary outputs of `wq`, `wq_b` and `wkv_a` into that order.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.deepseek_v3.config import Config
from plait.models.deepseek_v3.moe.torch import LOCAL, Exchange, MoE

INIT_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in f32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal multi-head latent attention, [B, T, D] -> [B, T, D] (arXiv 2412.19437, section 2.1.1).

    Keys and values of all heads come from one latent of L dims, queries from another; beside it, a key head has a
    rotary part, which all heads share.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        q_dim = config.num_heads * config.qk_head_dim
        kv_dim = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        latent_dim = config.kv_lora_rank
        if config.q_lora_rank is None:
            self.wq = _linear(config.dim, q_dim)
        else:
            self.wq_a = _linear(config.dim, config.q_lora_rank)
            self.q_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
            self.wq_b = _linear(config.q_lora_rank, q_dim)
        self.wkv_a = _linear(config.dim, latent_dim + config.qk_rope_head_dim)
        self.kv_norm = RMSNorm(latent_dim, config.norm_eps)
        self.wkv_b = _linear(latent_dim, kv_dim)
        self.wo = _linear(config.num_heads * config.v_head_dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        q = self.wq(x) if c.q_lora_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_rope = _heads(q, c.num_heads).tensor_split([c.qk_nope_head_dim], -1)
        latent, k_rope = self.wkv_a(x).tensor_split([c.kv_lora_rank], -1)
        kv = _heads(self.wkv_b(self.kv_norm(latent)), c.num_heads)
        k_nope, v = kv.tensor_split([c.qk_nope_head_dim], -1)
        k_rope = rotate(_heads(k_rope, 1), cos, sin).expand(-1, c.num_heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP, [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = _linear(dim, hidden_dim)
        self.w2 = _linear(hidden_dim, dim)
        self.w3 = _linear(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and what follows it, each normalised before and added to the residual stream.

    What follows is `mlp`, in a dense layer; else `shared`, the experts of every token as one MLP, and `moe`.
    """

    def __init__(self, config: Config, index: int, exchange: Exchange) -> None:
        super().__init__()
        self.is_dense = index < config.num_dense_layers
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        if self.is_dense:
            self.mlp = MLP(config.dim, config.hidden_dim)
        else:
            self.shared = MLP(config.dim, config.num_shared_experts * config.moe_hidden_dim)
            self.moe = MoE(config, exchange)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + (self.mlp(y) if self.is_dense else self.shared(y) + self.moe(y))


class DeepSeekV3(nn.Module):
    """i32[B, T] -> logits [B, T, vocabulary]; a forward in training mode changes the `counts` of the routers."""

    def __init__(self, config: Config, exchange: Exchange = LOCAL) -> None:
        super().__init__()
        self.config = config
        self.tok_embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config, i, exchange) for i in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = _linear(config.dim, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embed(tokens)
        cos, sin = rotary_tables(self.config, tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(config: Config, seed: int = 0, *, exchange: Exchange = LOCAL) -> DeepSeekV3:
    """A model with weights drawn from `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepSeekV3(config, exchange)
        for param in model.parameters():
            if param.ndim > 1:
                nn.init.normal_(param, std=INIT_STD)
    return model


def loss_fn(model: Callable[[Tensor], Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next token, in f32; {"tokens": i32[B, T], "targets": i32[B, T]}."""
    logits = model(batch["tokens"]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten().long())


def rotary_tables(config: Config, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, P/2] of the rotary angles, computed in f32, as `like`'s dtype."""
    exponents = torch.arange(0, config.qk_rope_head_dim, 2, device=like.device)
    exponents = exponents / config.qk_rope_head_dim
    positions = torch.arange(num_positions, dtype=torch.float32, device=like.device)
    angles = positions[:, None] * torch.pow(config.rope_base, -exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of [B, N, T, P] by tables [T, P/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, N * H] -> [B, N, T, H]."""
    return x.reshape(*x.shape[:-1], num_heads, -1).transpose(1, 2)
