"""Workloads by name: the same weights and batches for both frontends, in stages of even length."""

import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from plait.core_ir.errors import UsageError
from plait.core_ir.numerics import gradient_error, relative_error
from plait.frontends.jax import reference as jax_reference
from plait.frontends.torch import reference as torch_reference
from plait.models.llama import convert
from plait.workloads.family import family_names, find_family
from plait.workloads.workload import Sizes, load_workload, num_tokens

SIZES = Sizes("tiny", "f32", 8, 2)


def test_both_frontends_have_the_same_weights_and_batches() -> None:
    torch_side = load_workload("llama", "torch", SIZES)
    flax_side = load_workload("llama", "flax", SIZES)
    assert all(np.array_equal(torch_side.batch[k], flax_side.batch[k]) for k in torch_side.batch)
    a = torch_reference.reference(
        torch_side.loss_fn, torch_side.model, torch_side.batch, num_microbatches=2
    )
    b = jax_reference.reference(
        flax_side.loss_fn, flax_side.model, flax_side.batch, num_microbatches=2
    )
    assert relative_error(a.loss, b.loss) < 1e-6
    assert gradient_error(convert.to_flax(a.grads), b.grads) < 1e-5


def test_torch_is_split_by_paths_and_flax_by_boundaries() -> None:
    assert load_workload("mlp", "torch", Sizes("tiny", "f32", 8, 4)).split == [
        "layers.1",
        "layers.2",
        "layers.3",
    ]
    workload = load_workload("mlp", "flax", Sizes("tiny", "f32", 8, 4))
    assert workload.split is None
    assert workload.loss_fn.keywords["cuts"] == (1, 2, 3)  # type: ignore[attr-defined]
    chosen = load_workload("mlp", "flax", SIZES, ["layers.3"])
    assert chosen.loss_fn.keywords["cuts"] == (3,)  # type: ignore[attr-defined]
    assert load_workload("mlp", "torch", Sizes("tiny", "f32", 8, 1)).split is None


def test_a_flax_model_is_split_before_layers_that_it_has() -> None:
    for split in (["layers.4"], ["layers.0"], ["layers.2", "layers.1"], ["layers.1", "layers.1"]):
        with pytest.raises(
            UsageError, match=r"name layers once, in order, of layers\.1 to layers\.3"
        ):
            load_workload("mlp", "flax", SIZES, split)


def test_bf16_holds_for_parameters_and_batch() -> None:
    sizes = Sizes("tiny", "bf16", 8, 2)
    torch_side, flax_side = (load_workload("mlp", f, sizes) for f in ("torch", "flax"))
    assert {p.dtype for p in torch_side.model.parameters()} == {torch.bfloat16}
    assert {str(x.dtype) for x in jax.tree.leaves(flax_side.model)} == {"bfloat16"}
    assert torch_side.batch["x"].dtype == ml_dtypes.bfloat16
    assert load_workload("llama", "torch", sizes).batch["tokens"].dtype == np.int32


@pytest.mark.parametrize("frontend", ["torch", "flax"])
def test_abstract_model_of_7b_has_no_weights(frontend: str) -> None:
    workload = load_workload("llama", frontend, Sizes("7b", "f32", 2, 4), abstract=True)
    model: Any = workload.model
    if frontend == "torch":
        assert all(p.is_meta for p in model.parameters())
    else:
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model))


def test_streams_are_fixed_by_their_seed_and_held_out_text_is_apart() -> None:
    workload = load_workload("llama", "torch", SIZES)
    first, again = (next(workload.stream("train", 3))["tokens"] for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, next(workload.stream("held_out", 3))["tokens"])


def test_tokens_of_a_batch() -> None:
    assert num_tokens({"tokens": np.zeros((4, 7), np.int32), "x": np.zeros((4, 2, 3))}) == 28
    assert num_tokens({"x": np.zeros((4, 2, 3), np.float32), "scale": 1.0}) == 4
    assert num_tokens((torch.zeros(5, 2), [torch.zeros(5, dtype=torch.int64)])) == 5


def test_families_are_the_folders_with_a_config() -> None:
    assert family_names() == ("deepseek_v3", "llama", "mlp")
    assert find_family("mlp").config("tiny").num_layers == 4


def test_a_users_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_own.py").write_text(
        "import numpy as np\n"
        "def build():\n    return (lambda p, b: (p * b).sum()), np.ones(2, np.float32), np.ones((4, 2), np.float32)\n"
        "def pair():\n    return 1, 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    workload = load_workload("users_own:build", None, SIZES)
    assert (workload.frontend, workload.framework) == ("flax", "jax")
    assert next(workload.stream("train", 0)) is workload.batch
    with pytest.raises(UsageError, match=r"builds a flax model, but the frontend .* is 'torch'"):
        load_workload("users_own:build", "torch", SIZES)
    with pytest.raises(UsageError, match=r"users_own:pair\(\) must return \(loss_fn, model, batch"):
        load_workload("users_own:pair", None, SIZES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mlp", "flax", SIZES, ["head"]), "cut before layers; write layers.1"),
        (("mlp", "keras", SIZES), "unknown frontend 'keras'; there are: torch, flax"),
        (("mlp", "torch", Sizes("tiny", "f8", 8, 2)), "unknown dtype 'f8'; there are: f32, bf16"),
        (("mlp", "torch", Sizes("tiny", "f32", 8, 5)), "4 layers, which do not fill 5 stages"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_workload(*arguments)
