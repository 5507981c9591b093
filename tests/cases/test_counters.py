"""Buffers that count, over replicas: each replica counts what its parts of the batch add, from both frontends."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree
from counting import NUM_MICROBATCHES, SPLIT, Counting, CountingStack, X, check_counts, torch_loss
from process_group import run_ranks
from ranks_in_name import ranks_in_name_only
from torch import nn

import plait
from plait.frontends.torch.reference import reference as torch_reference
from plait.models.deepseek_v3 import parallel_torch
from plait.models.deepseek_v3 import torch as deepseek_torch
from plait.models.deepseek_v3.config import CONFIGS, batches
from plait.models.deepseek_v3.moe.torch import MoE

DEEPSEEK_V3 = replace(CONFIGS["tiny"], num_layers=2, seq_len=8, dim=32)


def tensors(batch: Any) -> Any:
    return {name: torch.tensor(np.asarray(x)) for name, x in batch.items()}


RUNS = [
    ("local", "zbv", {"stage": 2, "data": 2}),
    ("local", "dualpipev", {"data": 2, "stage": 2, "twin": 2}),
    ("mpmd", "dualpipev", {"stage": 2, "data": 4}),
    ("mpmd", "1f1b", {"stage": 4, "data": 4}),  # more ranks than devices
    ("spmd", "dualpipev", {"data": 2, "stage": 2, "twin": 2}),
]
each_run = pytest.mark.parametrize(("engine", "schedule", "mesh"), RUNS, ids=str)


@each_run
def test_counts_of_a_torch_model(engine: str, schedule: str, mesh: dict[str, int]) -> None:
    """Those of the model on the whole batch, for they do not depend on how it is cut."""
    model, batch = CountingStack(), torch.tensor(X)
    wanted = torch_reference(torch_loss, model, batch, num_microbatches=1)
    pipeline = Run("torch", engine, schedule).compile(
        torch_loss, model, batch, split=SPLIT, num_microbatches=NUM_MICROBATCHES, mesh=mesh
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):  # a step writes nothing to the model
        loss, _ = pipeline.loss_and_grads(batch)
        np.testing.assert_allclose(plait.to_numpy(loss), wanted.loss, rtol=1e-6)
        check_counts(numpy_tree(pipeline.state), wanted.buffers)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name


def test_steps_of_a_torch_model_go_on_from_its_counts() -> None:
    model, batch = CountingStack(), torch.tensor(X)
    wanted = torch_reference(torch_loss, model, torch.cat((batch, batch)), num_microbatches=2)
    pipeline = Run("torch", "local", "zbv").compile(
        torch_loss,
        model,
        batch,
        split=SPLIT,
        num_microbatches=NUM_MICROBATCHES,
        mesh={"stage": 2, "data": 2},
        codegen="inductor",
    )
    for _ in range(2):
        pipeline.step(batch)
    check_counts(numpy_tree(dict(model.named_buffers())), wanted.buffers)


def test_counts_of_gloo_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    for rank, ended in enumerate(run_ranks(Path(__file__).with_name("counter_runs.py"), [], 4)):
        assert ended.status == 0, f"rank {rank}:\n{ended.stderr[-3000:]}"
        assert ended.stdout.endswith("done\n")


def jax_loss(w: Any, x: Any, counts: Any) -> Any:
    """Four stages; each counts the entries of a row that are above 0."""
    after = {}
    for name in sorted(w):
        after[name] = counts[name] + (x > 0).sum(0, dtype=jnp.int32)
        x = jnp.tanh(x @ w[name])
        x = plait.stage_boundary(x) if name != "w3" else x
    return jnp.mean(x**2), after


@each_run
def test_counts_of_a_jax_model(engine: str, schedule: str, mesh: dict[str, int]) -> None:
    w = {f"w{n}": jnp.asarray(np.random.default_rng(n).normal(size=(3, 3))) for n in range(4)}
    counts = {name: jnp.arange(3, dtype=jnp.int32) for name in w}
    pipeline = Run("jax", engine, schedule).compile(
        jax_loss, w, X, num_microbatches=NUM_MICROBATCHES, mesh=mesh, state=counts
    )
    for _ in range(2):  # the second goes on from what the first left
        loss, _ = pipeline.loss_and_grads(X)
        wanted, counts = jax_loss(w, X, counts)
        np.testing.assert_allclose(plait.to_numpy(loss), wanted, rtol=1e-6)
        check_counts(numpy_tree(pipeline.state), numpy_tree(counts))


# Experts: ranks have tokens of their own each, and take part in each other's counts.


@pytest.mark.parametrize("engine", ["local", "mpmd"])
@pytest.mark.parametrize("axes", [{"expert": 2}, {"data": 2, "expert": 2}], ids=str)
def test_routers_of_ranks_that_have_tokens_of_their_own(axes: dict[str, int], engine: str) -> None:
    plain = deepseek_torch.build(DEEPSEEK_V3)
    batch = tensors(next(batches(DEEPSEEK_V3, "train", 8, seed=0)))
    wanted = torch_reference(deepseek_torch.loss_fn, plain, batch, num_microbatches=2)
    with ranks_in_name_only({"stage": 2, **axes}) as devices:
        model = deepseek_torch.build(DEEPSEEK_V3)
        model = parallel_torch.expert_parallel(model, devices["expert"])
        pipeline = Run("torch", engine, "1f1b").compile(
            deepseek_torch.loss_fn,
            model,
            batch,
            split=["layers.1"],
            num_microbatches=2,
            mesh={"stage": 2, **axes},
            data_axes=tuple(axes),
        )
        params = {name: p.detach() for name, p in plain.named_parameters()}
        pipeline.loss_and_grads(batch, params)
    counts = {name: x for name, x in wanted.buffers.items() if name.endswith("counts")}
    assert counts
    check_counts(numpy_tree(pipeline.state), counts)


def test_ranks_that_would_differ_are_refused() -> None:
    batch = tensors(next(batches(DEEPSEEK_V3, "train", 8, seed=0)))
    with ranks_in_name_only({"stage": 2, "expert": 2}) as devices:
        model = deepseek_torch.build(DEEPSEEK_V3)
        parallel_torch.expert_parallel(model, devices["expert"])
        for module in model.modules():
            if isinstance(module, MoE):
                module.exchange = replace(module.exchange, total=lambda counts: counts)
        refused = r"stage 1: buffer 'layers\.1\.moe\.router\.counts' .*along 'expert'.*all_reduce"
        with pytest.raises(plait.PlaitError, match=refused):
            plait.compile(
                deepseek_torch.loss_fn,
                model,
                batch,
                split=["layers.1"],
                num_microbatches=2,
                mesh={"stage": 2, "expert": 2},
                data_axes=("expert",),
                engine="local",
                codegen="eager",
            )


@pytest.mark.parametrize(
    "update",
    [
        lambda m, x: m.above.sub_((x > 0).sum(0, dtype=torch.int32)),
        lambda m, x: m.above.index_add_(0, x.argmax(1), torch.ones(len(x), dtype=torch.int32)),
        lambda m, x: m.weighed.scatter_add_(0, x.argmax(1), torch.full((len(x),), 0.5)),
        lambda m, x: m.above.index_put_((x.argmax(1),), torch.tensor(2).int(), accumulate=True),
        lambda m, x: m.rows.add_(1).add_(len(x)),
    ],
    ids=["sub", "index_add", "scatter_add", "index_put", "twice"],
)
def test_ways_to_count(update: Callable[[Any, Any], Any]) -> None:
    class Adding(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            update(self, x)
            return self.linear(x)  # type: ignore[no-any-return]

    def loss_fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()  # type: ignore[no-any-return]

    model, batch = nn.Sequential(Adding(), Adding()), torch.tensor(X)
    wanted = torch_reference(loss_fn, model, batch, num_microbatches=8)
    pipeline = Run("torch", "local", "1f1b").compile(
        loss_fn, model, batch, split=["1"], num_microbatches=4, mesh={"stage": 2, "data": 2}
    )
    pipeline.step(batch)
    check_counts(numpy_tree(dict(model.named_buffers())), wanted.buffers)


@pytest.mark.parametrize("update", [lambda s, x: s.at[x].add(1), lambda s, x: s - x.sum()])
def test_ways_to_count_in_jax(update: Callable[[Any, Any], Any]) -> None:
    def loss_fn(w: Any, x: Any, s: Any) -> Any:
        return jnp.mean((plait.stage_boundary(x * w) - 1) ** 2), update(
            s, (x[:, 0] > 0).astype(int)
        )

    w, s = jnp.ones(3), jnp.arange(2)
    pipeline = Run("jax", "mpmd", "1f1b").compile(
        loss_fn, w, X, num_microbatches=4, mesh={"stage": 2, "data": 2}, state=s
    )
    pipeline.loss_and_grads(X)
    np.testing.assert_array_equal(pipeline.state, loss_fn(w, X, s)[1])


# What is no count.


@pytest.mark.parametrize(
    "update",
    [
        lambda m, x: m.above.copy_((x > 0).sum(0)),
        lambda m, x: m.weighed.lerp_(x.mean(0), 0.1),
        lambda m, x: m.rows.add_(m.rows),
        lambda m, x: m.rows.add_(1).mul_(2),
        lambda m, x: (m.rows.add_(1), x.mul_(m.rows)),
    ],
    ids=["set", "mean", "itself", "doubled", "read"],
)
def test_other_changes_are_refused(update: Callable[[Any, Any], Any]) -> None:
    class Changing(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            update(self, x)
            return self.linear(x)  # type: ignore[no-any-return]

    model = nn.Sequential(Changing(), Changing())
    with pytest.raises(plait.PlaitError, match=r"stage 0: buffer '0\.\w+' changes .*along 'data'"):
        Run("torch", "local", "1f1b").compile(
            lambda m, x: m(x).square().mean(),
            model,
            torch.tensor(X),
            split=["1"],
            num_microbatches=NUM_MICROBATCHES,
            mesh={"stage": 2, "data": 2},
        )
