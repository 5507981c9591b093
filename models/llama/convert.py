"""Weights of Llama between PyTorch and Flax, exactly: names change and linear weights transpose.

layers.0.attn.wq.weight [out, in]  <->  layers.0.attn.wq.kernel [in, out]
tok_embed.weight                   <->  tok_embed.embedding
layers.0.attn_norm.weight          <->  layers.0.attn_norm.weight
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Weights = Mapping[str, npt.NDArray[np.generic]]

LINEAR = frozenset({"wq", "wk", "wv", "wo", "w1", "w2", "w3", "head"})


def to_flax(weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
    """PyTorch weights under Flax names and layouts."""
    return dict(_to_flax(name, array) for name, array in weights.items())


def to_torch(weights: Weights) -> dict[str, npt.NDArray[np.generic]]:
    """Flax weights under PyTorch names and layouts, the inverse of `to_flax`."""
    return dict(_to_torch(name, array) for name, array in weights.items())


def _to_flax(name: str, array: npt.NDArray[np.generic]) -> tuple[str, npt.NDArray[np.generic]]:
    module = name.removesuffix(".weight")
    if module.rpartition(".")[2] in LINEAR:
        return f"{module}.kernel", np.ascontiguousarray(array.T)
    if module == "tok_embed":
        return f"{module}.embedding", array
    return name, array


def _to_torch(name: str, array: npt.NDArray[np.generic]) -> tuple[str, npt.NDArray[np.generic]]:
    module, _, leaf = name.rpartition(".")
    if leaf == "kernel":
        return f"{module}.weight", np.ascontiguousarray(array.T)
    return f"{module}.weight", array
