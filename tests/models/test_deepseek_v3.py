"""DeepSeek-V3's latent attention against its formulas in NumPy; its sizes against the published ones."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from flax import nnx

import plait.models.weights.flax as flax_weights
import plait.models.weights.torch as torch_weights
from plait.models.deepseek_v3 import convert
from plait.models.deepseek_v3 import flax as deepseek_flax
from plait.models.deepseek_v3 import torch as deepseek_torch
from plait.models.deepseek_v3.config import CONFIGS, Config

Array = npt.NDArray[np.float64]

TINY = replace(CONFIGS["tiny"], v_head_dim=12)
CASES = {"compressed queries": TINY, "plain queries": replace(TINY, q_lora_rank=None)}


@pytest.mark.parametrize("side", ["torch", "flax"])
@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_attention_is_that_of_the_paper(config: Config, side: str) -> None:
    """One position of one head at a time, by the equations of arXiv 2412.19437, section 2.1.1."""
    rng = np.random.default_rng(0)
    torch_side = deepseek_torch.Attention(config)
    weights = {
        name: rng.normal(scale=0.3, size=array.shape).astype(np.float32)
        for name, array in torch_weights.read(torch_side).items()
    }
    x = rng.normal(size=(2, 7, config.dim)).astype(np.float32)
    if side == "torch":
        torch_weights.write(torch_side, weights)
        tables = deepseek_torch.rotary_tables(config, 7, torch.from_numpy(x))
        found = torch_side(torch.from_numpy(x), *tables).detach().numpy()
    else:
        flax_side = deepseek_flax.Attention(config, rngs=nnx.Rngs(0))
        flax_weights.write(flax_side, convert.to_flax(weights))
        found = flax_side(x, *deepseek_flax.rotary_tables(config, 7, jnp.asarray(x)))
    expected = np.stack([attention_of(config, weights, row.astype(np.float64)) for row in x])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def attention_of(config: Config, weights: Any, x: Array) -> Array:
    """[T, D] -> [T, D]."""
    w = {name.removesuffix(".weight"): a.astype(np.float64) for name, a in weights.items()}
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    queries, keys, values = [], [], []
    for t, row in enumerate(x):
        if config.q_lora_rank is None:
            q = w["wq"] @ row
        else:
            q = w["wq_b"] @ normalised(w["wq_a"] @ row, w["q_norm"], config.norm_eps)
        down = w["wkv_a"] @ row
        latent = normalised(down[: config.kv_lora_rank], w["kv_norm"], config.norm_eps)
        shared_key = turned(down[config.kv_lora_rank :], t, config.rope_base)
        up = (w["wkv_b"] @ latent).reshape(config.num_heads, nope + value)
        q = q.reshape(config.num_heads, nope + rope)
        queries.append(
            [np.concatenate([h[:nope], turned(h[nope:], t, config.rope_base)]) for h in q]
        )
        keys.append([np.concatenate([h[:nope], shared_key]) for h in up])
        values.append([h[nope:] for h in up])
    out = []
    for t in range(len(x)):
        heads = []
        for h in range(config.num_heads):
            scores = np.array([queries[t][h] @ keys[s][h] for s in range(t + 1)])
            exps = np.exp(scores / math.sqrt(nope + rope))
            heads.append(sum(e * values[s][h] for s, e in enumerate(exps)) / exps.sum())
        out.append(w["wo"] @ np.concatenate(heads))
    return np.stack(out)


def normalised(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean() + eps) * weight


def turned(x: Array, position: int, base: float) -> Array:
    """Each pair (x[i], x[i + half]) as a complex number, turned by position / base^(i / half)."""
    half = len(x) // 2
    angles = position * base ** -(np.arange(half) / half)
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag])


@pytest.mark.parametrize(
    ("name", "total", "active"),
    # DeepSeek-V2-Lite: 15.7 B, 2.4 B of them active (arXiv 2405.04434, appendix B), where the rows of the embedding
    # that a token does not read are not counted. DeepSeek-V3: 671 B, 37 B active (arXiv 2412.19437, abstract).
    [("16b", 15.7, 2.4), ("671b", 671, 37)],
)
def test_sizes_are_the_published_ones(name: str, total: float, active: float) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = deepseek_torch.build(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    used = sum(sizes.values()) - routed + routed * config.top_k // config.num_experts
    assert sum(sizes.values()) / 1e9 == pytest.approx(total, rel=2e-3)
    assert (used - config.vocab_size * config.dim) / 1e9 == pytest.approx(active, rel=0.025)
    abstract = nnx.eval_shape(partial(deepseek_flax.build, config))
    params = jax.tree.leaves(nnx.state(abstract, nnx.Param))
    assert sum(math.prod(x.shape) for x in params) == sum(sizes.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk_rope_head_dim": 7}, "rotary head size 7 is odd"),
        ({"num_dense_layers": 5}, "5 of 4 layers cannot be dense"),
        ({"num_groups": 3}, "8 experts do not form 3 equal groups"),
        ({"num_groups": 8}, "the score of its best two experts, and here it has one"),
        ({"top_groups": 5}, "5 of 4 groups cannot be chosen"),
        ({"top_k": 5}, "5 experts do not stand in 2 groups of 2"),
        ({"capacity_factor": 0.0}, "capacity_factor 0.0 is not above 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIGS["tiny"], **change)
