"""Checkpointed models under split backward: the numbers of the plain model, less kept, each product once more in I.

Llama with torch.utils.checkpoint or jax.checkpoint around every layer: `full` keeps the layer's input alone, `policy`
keeps the products with weights too, so that attention is what is computed again.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import plait
from plait.capturing import capture_program
from plait.core_ir.cost import flops, seconds
from plait.core_ir.graph import Graph
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.core_ir.program import Program, Stage
from plait.extras import load
from plait.frontends.reference import Reference
from plait.models.llama import flax as llama_flax
from plait.models.llama import torch as llama_torch
from plait.models.llama.config import Config

CONFIG = Config(
    vocab_size=32, dim=16, hidden_dim=24, num_layers=4, num_heads=2, num_kv_heads=1, seq_len=8
)
NUM_MICROBATCHES = 4
PRODUCTS = ("dot_general", "attention")
KINDS = ("none", "full", "policy")


# The two frameworks' models.


class FullLayer(llama_torch.Layer):
    def forward(self, *args: Any) -> Any:
        return checkpoint(super().forward, *args, use_reentrant=False)


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class PolicyLayer(llama_torch.Layer):
    def forward(self, *args: Any) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_products)
        return checkpoint(super().forward, *args, use_reentrant=False, context_fn=contexts)


TORCH_LAYERS = {"none": llama_torch.Layer, "full": FullLayer, "policy": PolicyLayer}


def torch_model(kind: str) -> Any:
    model = llama_torch.build(CONFIG)
    for layer in model.layers:
        layer.__class__ = TORCH_LAYERS[kind]
    return model


def _call_layer(layer: Any, *args: Any) -> Any:
    return layer(*args)


JAX_CALLS: dict[str, Callable[..., Any]] = {
    "none": _call_layer,
    "full": jax.checkpoint(_call_layer),
    "policy": jax.checkpoint(
        _call_layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def jax_loss(kind: str, cuts: tuple[int, ...]) -> Callable[..., Any]:
    def loss_fn(model: Any, batch: Any) -> Any:
        x = model.tok_embed(batch["tokens"])
        tables = llama_flax.rotary_tables(CONFIG, x.shape[1], x)
        for index, layer in enumerate(model.layers):
            x = plait.stage_boundary(x) if index in cuts else x
            x = JAX_CALLS[kind](layer, x, *tables)
        logits = model.head(model.norm(x)).astype(jnp.float32)
        return llama_flax.cross_entropy(logits, batch["targets"])

    return loss_fn


@dataclass(frozen=True)
class Source:
    """A checkpointed model of one framework, cut into stages."""

    framework: str
    kind: str
    num_stages: int = 4

    @property
    def arguments(self) -> dict[str, Any]:
        """What `plait.compile` is given of it."""
        cuts = CONFIG.cuts(self.num_stages)
        tokens = np.random.default_rng(0).integers(0, 32, (2 * NUM_MICROBATCHES, 8), np.int32)
        arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
        if self.framework == "torch":
            return {
                "loss_fn": llama_torch.loss_fn,
                "model": torch_model(self.kind),
                "batch": {name: torch.tensor(array) for name, array in arrays.items()},
                "split": [f"layers.{cut}" for cut in cuts],
                "num_microbatches": NUM_MICROBATCHES,
            }
        return {
            "loss_fn": jax_loss(self.kind, cuts),
            "model": llama_flax.build(CONFIG),
            "batch": {name: jnp.asarray(array) for name, array in arrays.items()},
            "num_microbatches": NUM_MICROBATCHES,
        }


@functools.cache
def program(framework: str, kind: str) -> Program:
    return capture_program(**Source(framework, kind).arguments)[1]


def num_products(task: Graph) -> int:
    return sum(eqn.op.name in PRODUCTS for eqn in task.eqns)


def kept_bytes(stage: Stage) -> int:
    """What the backward reads of the forward, parameters and batch aside."""
    task = stage.tasks["B"]
    ports = zip(task.inputs, task.input_ports, strict=True)
    return sum(v.type.num_bytes for v, p in ports if p.role in ("residual", "activation"))


# What the tasks hold.

# Six of seven products with weights (the backward reads nothing of the last) and attention, which JAX writes as two.
AGAIN = {
    "torch": {"none": 0, "full": 7, "policy": 1},
    "jax": {"none": 0, "full": 8, "policy": 2},
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_products_are_computed_again_once_and_in_the_input_part(framework: str) -> None:
    plain = program(framework, "none")
    for kind, again in AGAIN[framework].items():
        for stage, without in zip(program(framework, kind).stages, plain.stages, strict=True):
            for task, more in (("F", 0), ("I", again), ("W", 0), ("B", again)):
                expected = num_products(without.tasks[task]) + more
                assert num_products(stage.tasks[task]) == expected, (kind, stage.index, task)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_cost_model_counts_recomputation_once(framework: str) -> None:
    plain = program(framework, "none")
    for kind in ("full", "policy"):
        for stage, without in zip(program(framework, kind).stages, plain.stages, strict=True):
            cost = {name: flops(task) for name, task in stage.tasks.items()}
            before = {name: flops(task) for name, task in without.tasks.items()}
            assert cost["B"] == cost["I"] + cost["W"]
            assert cost["W"] == before["W"]
            assert before["I"] < cost["I"] < before["I"] + before["F"]
            assert seconds(stage.tasks["I"]) > seconds(without.tasks["I"])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_less_is_kept(framework: str) -> None:
    row = 2 * 8 * 4  # one feature of a microbatch, in bytes
    saved = 2 * CONFIG.dim + 2 * 8 + 2 * CONFIG.hidden_dim  # wq, wo; wk, wv; w1, w3
    for index in (1, 2):
        kept = {kind: kept_bytes(program(framework, kind).stages[index]) for kind in KINDS}
        assert kept["full"] == row * CONFIG.dim
        assert kept["policy"] == row * (CONFIG.dim + saved)
        assert kept["policy"] < kept["none"] / 2


# What they compute.


@functools.cache
def reference(framework: str) -> Reference:
    """The unpipelined model, not checkpointed."""
    arguments = Source(framework, "none").arguments
    module = load(framework, f"frontends.{framework}.reference")  # type: ignore[arg-type]
    result: Reference = module.reference(
        **{name: value for name, value in arguments.items() if name != "split"}
    )
    return result


def check(source: Source, **options: Any) -> plait.Pipeline:
    arguments = source.arguments
    pipeline = plait.compile(**arguments, num_ranks=2, **options)
    loss, grads = pipeline.loss_and_grads(arguments["batch"])
    module = load(source.framework, f"frontends.{source.framework}.reference")  # type: ignore[arg-type]
    wanted = reference(source.framework)
    is_same = options.get("backend", source.framework) == source.framework
    allowed = tolerance("f32", "framework" if is_same else "backends")
    assert relative_error(plait.to_numpy(loss), wanted.loss) <= allowed.loss
    assert gradient_error(module.named_gradients(grads), wanted.grads) <= allowed.grads
    return pipeline


@pytest.mark.parametrize(("schedule", "num_stages"), [("zb-h1", 2), ("zbv", 4)])
@pytest.mark.parametrize("kind", ["full", "policy"])
def test_torch_eager(kind: str, schedule: str, num_stages: int) -> None:
    check(Source("torch", kind, num_stages), schedule=schedule, codegen="eager")


@pytest.mark.parametrize(
    ("kind", "schedule", "num_stages"), [("full", "zbv", 4), ("policy", "zb-h1", 2)]
)
def test_jax_programs_by_task(kind: str, schedule: str, num_stages: int) -> None:
    check(Source("jax", kind, num_stages), schedule=schedule)


def test_jax_one_program() -> None:
    check(Source("jax", "full", 2), schedule="zb-h1", engine="spmd")


def test_inductor() -> None:
    check(Source("torch", "full"), schedule="zbv", codegen="inductor")


def test_one_framework_on_the_backend_of_the_other() -> None:
    check(Source("torch", "policy", 2), schedule="zb-h1", backend="jax")
    check(Source("jax", "policy", 2), schedule="zb-h1", backend="torch", codegen="eager")
