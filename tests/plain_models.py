"""Models as users have them, written without Plait: their layers are not changed, and cuts are given from outside."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import plait
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.extras import load

NUM_MICROBATCHES, WIDTH = 4, 8
RNG = np.random.default_rng(0)
SEQUENCES = RNG.normal(size=(8, 5, WIDTH)).astype(np.float32)
IMAGES = RNG.normal(size=(8, 3, 8, 8)).astype(np.float32)


@dataclass(frozen=True)
class Plain:
    """framework: of the model, whose own gradients are the oracle."""

    framework: str
    loss_fn: Callable[[Any, Any], Any]
    model: Any
    batch: Any
    split: list[str] | None = None

    def check(self, engine: str) -> plait.Pipeline:
        """AssertionError unless four stages under DualPipeV give the loss and the gradients of the model itself."""
        backend = "torch" if engine in ("local", "distributed") else "jax"
        pipeline = plait.compile(
            self.loss_fn,
            self.model,
            self.batch,
            split=self.split,
            schedule="dualpipev",
            num_ranks=2,
            num_microbatches=NUM_MICROBATCHES,
            backend=backend,
            engine=engine,
            codegen="eager" if backend == "torch" else None,
        )
        assert pipeline.program.num_stages == 4
        assert pipeline.program.pairs
        loss, grads = pipeline.loss_and_grads(self.batch)
        of_framework = load(self.framework, f"frontends.{self.framework}.reference")
        wanted = of_framework.reference(
            self.loss_fn, self.model, self.batch, num_microbatches=NUM_MICROBATCHES
        )
        found = of_framework.named_gradients(grads)
        if engine == "distributed":
            assert found.keys() < wanted.grads.keys()
        else:
            assert found.keys() == wanted.grads.keys()
        allowed = tolerance("f32", "framework" if backend == self.framework else "backends")
        assert relative_error(plait.to_numpy(loss), wanted.loss) <= allowed.loss
        expected = {name: wanted.grads[name] for name in found}
        assert gradient_error(found, expected) <= allowed.grads
        return pipeline


def encoder() -> Plain:
    """PyTorch's own Transformer encoder."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    split = [f"layers.{number}" for number in (1, 2, 3)]
    return Plain("torch", lambda m, x: (m(x) - x).pow(4).mean(), model, SEQUENCES, split)


class Residual(nn.Module):
    """A block of a residual network, as vision libraries have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def residual() -> Plain:
    """Convolutions, batch norm with its buffers, changes in place."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        *(Residual(4) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    return Plain("torch", lambda m, x: m(x).square().mean(), model, IMAGES, ["1", "2", "3"])


class Block(linen.Module):
    """A layer of a Transformer, of flax.linen's own parts."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        # A bias of the keys has a gradient of 0, which rounding alone would be measured by.
        attention = linen.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
        x = x + attention(linen.LayerNorm()(x))
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(16)(linen.LayerNorm()(x))))


class Blocks(linen.Module):
    def setup(self) -> None:
        self.blocks = [Block() for _ in range(4)]

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def linen_blocks() -> Plain:
    model = Blocks()
    variables = model.init(jax.random.key(0), SEQUENCES)

    def loss_fn(variables: Any, x: Any) -> Any:
        return jnp.mean(model.apply(variables, x) ** 2)

    return Plain("jax", loss_fn, variables, SEQUENCES, [f"blocks_{n}" for n in (1, 2, 3)])


def layer(p: Any, x: Any) -> Any:
    """A function of arrays: attention, and a mixture of two MLPs by weight."""
    scores = jax.nn.softmax((x @ p["q"]) @ (x @ p["k"]).swapaxes(-1, -2) / WIDTH**0.5)
    x = x + scores @ (x @ p["v"])
    weights = jax.nn.softmax(x @ p["gate"])
    experts = jnp.einsum("bth,ehd->ebtd", jnp.tanh(x @ p["up"]), p["down"])
    return x + jnp.einsum("ebtd,bte->btd", experts, weights)


def function() -> Plain:
    """Layers in a loop; the loss marks where one stage ends."""
    sizes = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "gate": (8, 2), "up": (8, 6), "down": (2, 6, 8)}
    params = [
        {n: jnp.asarray(RNG.normal(size=s) * 0.3, jnp.float32) for n, s in sizes.items()}
        for _ in range(4)
    ]

    def loss_fn(params: Any, x: Any) -> Any:
        for number, p in enumerate(params):
            x = layer(p, plait.stage_boundary(x) if number else x)
        return jnp.mean(x**2)

    return Plain("jax", loss_fn, params, SEQUENCES)


MODELS: dict[str, Callable[[], Plain]] = {
    "encoder": encoder,
    "residual": residual,
    "linen": linen_blocks,
    "function": function,
}
