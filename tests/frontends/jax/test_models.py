"""Whole models in linen, nnx and equinox: loss and every gradient of the captured step against JAX."""

from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax_checks import check_step, marks, random, run

from plait.frontends.jax.boundary import stage_boundary
from plait.models.llama import flax as llama
from plait.models.llama.config import CONFIGS as LLAMAS
from plait.models.mlp import flax as mlp
from plait.models.mlp.config import CONFIGS as MLPS

KEY = jax.random.key(0)
MICROBATCH_KEY = jax.random.wrap_key_data(jnp.array([0, 7], jnp.uint32))
TOKENS = random((2, 6), "i4", 0, 10)
IMAGES = random((2, 10, 10, 3), low=-1, high=1)
SERIES = random((2, 5, 4), low=-1, high=1)


# Without bias: that of the keys has a gradient of zero in exact arithmetic, of which rounding makes noise.
Attention = partial(
    nn.MultiHeadDotProductAttention, dropout_rate=0.1, deterministic=False, use_bias=False
)


class Transformer(nn.Module):
    """Embedding, masked attention with dropout, layer norm, GELU, recomputation."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(11, 16)(tokens)
        for i in range(2):
            mask = nn.make_causal_mask(tokens)
            y = nn.LayerNorm(name=f"norm{i}")(x)
            y = Attention(4, name=f"attention{i}")(y, y, mask=mask)
            x = x + nn.Dropout(0.1, deterministic=False)(y)
            x = x + nn.gelu(nn.remat(nn.Dense)(16, name=f"mlp{i}")(x))
        return nn.RMSNorm()(x)


class Scanned(nn.Module):
    """Layers whose parameters are stacked and scanned over."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(x, None)[0]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return jnp.tanh(nn.Dense(4)(stage_boundary(x))) + x, None


class CNN(nn.Module):
    """Convolutions of every kind, pooling, batch and group norm."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(4, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.max_pool(x, (2, 2), (2, 2), "SAME")
        x = nn.Conv(8, (3, 3), feature_group_count=4, kernel_dilation=2)(x)
        x = nn.ConvTranspose(4, (3, 3), strides=(2, 2))(nn.silu(x))
        x = nn.avg_pool(nn.GroupNorm(2)(x), (2, 2))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


def linen_loss(module: nn.Module, variables: Any, batch: Any) -> Any:
    return jnp.mean(module.apply(variables, batch) ** 2)


def test_linen_transformer() -> None:
    module = Transformer()
    variables = jax.jit(module.init)({"params": KEY, "dropout": KEY}, TOKENS)

    def loss(variables: Any, tokens: Any, *, rng: Any) -> Any:
        logits = module.apply(variables, tokens, rngs={"dropout": rng})
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -picked.mean()

    expected = jax.jit(jax.value_and_grad(loss))(variables, TOKENS, rng=MICROBATCH_KEY)
    check_step(loss, variables, TOKENS, *expected)
    check_step(loss, variables, TOKENS, *expected, split=["norm1", "mlp1"])


def test_linen_scan_over_layers_is_cut_inside() -> None:
    module = Scanned()
    variables = jax.jit(module.init)(KEY, SERIES)
    loss = partial(linen_loss, module)
    captured = check_step(
        loss, variables, SERIES, *jax.jit(jax.value_and_grad(loss))(variables, SERIES)
    )
    assert [index for index, _, _ in marks(captured)] == [0, 1, 2, 2, 1, 0]


def test_linen_cnn_with_batch_statistics() -> None:
    variables = jax.jit(CNN().init)(KEY, IMAGES)
    state = {"batch_stats": variables["batch_stats"]}

    def loss(params: Any, images: Any, state: Any) -> Any:
        y, new = CNN().apply({"params": params, **state}, images, mutable=["batch_stats"])
        return jnp.mean(y**2), new

    (value, new), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        variables["params"], IMAGES, state
    )
    captured = check_step(
        loss, variables["params"], IMAGES, value, grads, state=state, split=["Conv_1"]
    )
    out = run(captured, IMAGES)
    for name in ("mean", "var"):
        found = out["buffer_update", f"batch_stats.BatchNorm_0.{name}"]
        np.testing.assert_allclose(
            found, new["batch_stats"]["BatchNorm_0"][name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell])
def test_linen_recurrent_networks(cell: Any) -> None:
    module = nn.Sequential([nn.RNN(cell(6)), nn.Dense(3)])
    variables = jax.jit(module.init)(KEY, SERIES)
    loss = partial(linen_loss, module)
    captured = check_step(
        loss,
        variables,
        SERIES,
        *jax.jit(jax.value_and_grad(loss))(variables, SERIES),
        split=["layers_1"],
    )
    assert [eqn.op.name for eqn in captured.graph.eqns].count("scan") == 2


def test_nnx_gated_mlp() -> None:
    config = MLPS["tiny"]
    model = mlp.build(config)
    batch = {
        "x": random((4, config.dim), low=-1, high=1),
        "y": random((4, config.dim), low=-1, high=1),
    }
    loss = partial(mlp.loss_fn, cuts=(1, 3), boundary=stage_boundary)
    captured = check_step(loss, model, batch, *nnx.jit(nnx.value_and_grad(loss))(model, batch))
    assert captured.num_cuts == 2


@pytest.mark.parametrize("tied", [False, True])
def test_nnx_llama(tied: bool) -> None:
    config = next(c for c in LLAMAS.values() if c.dim <= 64)
    config = type(config)(**{**vars(config), "num_layers": 2, "tied_head": tied})
    model = llama.build(config)
    tokens = random((2, 9), "i4", 0, config.vocab_size - 1)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    loss = partial(llama.loss_fn, cuts=(1,), boundary=stage_boundary)
    captured = check_step(loss, model, batch, *nnx.jit(nnx.value_and_grad(loss))(model, batch))
    assert captured.num_cuts == 1


class Decoder(nnx.Module):
    """Attention with a cache-less mask, a convolution, batch norm, an LSTM, and dropout with its own random state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3,), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))
        x = stage_boundary(self.norm(self.conv(x)))
        return self.rnn(self.drop(x))


def test_nnx_modules_with_state() -> None:
    def loss(model: Decoder, x: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    model = Decoder(nnx.Rngs(0))
    after = nnx.clone(model)
    check_step(loss, model, SERIES, *nnx.jit(nnx.value_and_grad(loss))(after, SERIES))


class Block(eqx.Module):
    """Attention, layer norm, dropout, a convolution and a GRU over the time steps of one sample."""

    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    drop: eqx.nn.Dropout
    conv: eqx.nn.Conv1d
    cell: eqx.nn.GRUCell
    mlp: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 4)
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=keys[0])
        self.norm, self.drop = eqx.nn.LayerNorm(4), eqx.nn.Dropout(0.2)
        self.conv = eqx.nn.Conv1d(4, 4, 3, padding=1, key=keys[1])
        self.cell = eqx.nn.GRUCell(4, 4, key=keys[2])
        self.mlp = eqx.nn.MLP(4, 2, 8, 2, key=keys[3])

    def __call__(self, x: Any, key: Any) -> Any:
        x = jax.vmap(self.norm)(self.attention(x, x, x))
        x = stage_boundary(self.conv(self.drop(x, key=key).T).T)
        h, _ = lax.scan(lambda h, row: (self.cell(row, h), None), jnp.zeros(4), x)
        return self.mlp(h)


def test_equinox_block() -> None:
    def loss(model: Block, x: Any, rng: Any) -> Any:
        keys = jax.random.split(rng, x.shape[0])
        return jnp.mean(jax.vmap(model)(x, keys) ** 2)

    model = Block(KEY)
    captured = check_step(
        loss,
        model,
        SERIES,
        *eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, SERIES, MICROBATCH_KEY),
    )
    assert captured.num_cuts == 1
