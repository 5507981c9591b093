"""Weights of DeepSeek-V3 between PyTorch and Flax, exactly: names change and linear weights transpose.

layers.0.attn.wkv_a.weight [out, in]      <->  layers.0.attn.wkv_a.kernel [in, out]
layers.3.moe.router.gate.weight [E, D]    <->  layers.3.moe.router.gate.kernel [D, E]
tok_embed.weight                          <->  tok_embed.embedding
layers.3.moe.experts.w1 [E, D, H], norms, and the routers' buffers `bias` and `counts` are the same on both sides.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Weights = Mapping[str, npt.NDArray[np.generic]]

LINEAR = frozenset({"wq", "wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3", "gate", "head"})


def to_flax(weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
    """PyTorch weights under Flax names and layouts."""
    return dict(_to_flax(name, array) for name, array in weights.items())


def to_torch(weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
    """Flax weights under PyTorch names and layouts, the inverse of `to_flax`."""
    return dict(_to_torch(name, array) for name, array in weights.items())


def _to_flax(name: str, array: npt.NDArray[np.generic]) -> tuple[str, npt.NDArray[np.generic]]:
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" and module.rpartition(".")[2] in LINEAR:
        return f"{module}.kernel", np.ascontiguousarray(array.T)
    if name == "tok_embed.weight":
        return "tok_embed.embedding", array
    return name, array


def _to_torch(name: str, array: npt.NDArray[np.generic]) -> tuple[str, npt.NDArray[np.generic]]:
    module, _, leaf = name.rpartition(".")
    if leaf == "kernel":
        return f"{module}.weight", np.ascontiguousarray(array.T)
    if leaf == "embedding":
        return f"{module}.weight", array
    return name, array
