"""Llama in PyTorch.

Shapes: B batch, T time, D model dim, N heads, K key-value heads, H head dim, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.llama.config import Config

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

INIT_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in f32."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


def attend_causally(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped-query attention; [B, N, T, H], [B, K, T, H] twice -> [B, N, T, H]."""
    num_groups = q.shape[1] // k.shape[1]
    k, v = repeat_heads(k, num_groups), repeat_heads(v, num_groups)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal grouped-query attention with its projections, [B, T, D] -> [B, T, D]; of all heads, or of some."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        kv_dim = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attend: Attend = attend_causally
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.wo(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP, [B, T, D] -> [B, T, D]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """i32[B, T] -> logits [B, T, V]; of a sequence from position `start` on."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.tok_embed.weight

    def forward(self, tokens: Tensor, start: int | None = None) -> Tensor:
        x = self.tok_embed(tokens)
        cos, sin = rotary_tables(self.config, tokens.shape[1], x, start)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(config: Config, seed: int = 0) -> Llama:
    """A model with weights drawn from `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Llama(config)
        for param in model.parameters():
            if param.ndim > 1:
                nn.init.normal_(param, std=INIT_STD)
    return model


def loss_fn(model: Callable[[Tensor], Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of the next token, in f32; {"tokens": i32[B, T], "targets": i32[B, T]}."""
    logits = model(batch["tokens"]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten().long())


def rotary_tables(
    config: Config, num_positions: int, like: Tensor, start: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, H/2] of the rotary angles from `start` on, computed in f32, as `like`'s dtype."""
    exponents = torch.arange(0, config.head_dim, 2, device=like.device) / config.head_dim
    positions = torch.arange(num_positions, dtype=torch.float32, device=like.device)
    if start is not None:
        positions = positions + start
    angles = positions[:, None] * torch.pow(config.rope_base, -exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of [B, N, T, H] by tables [T, H/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def repeat_heads(x: Tensor, num_groups: int) -> Tensor:
    """[B, K, T, H] -> [B, K * num_groups, T, H]: each head `num_groups` times in a row."""
    return x[:, :, None].expand(-1, -1, num_groups, -1, -1).flatten(1, 2)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, T, N * H] -> [B, N, T, H]."""
    return x.reshape(*x.shape[:-1], -1, head_dim).transpose(1, 2)
