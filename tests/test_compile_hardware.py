"""`plait.compile(hardware=)`: what is ordered, searched and simulated by it, and what a device is taken for."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from torch import nn

import plait
from plait.backends.jax import engines as jax_engines
from plait.backends.torch import engines as torch_engines
from plait.core_ir.graph import Eqn
from plait.core_ir.named_hardware import CPU_CORE, H100, H200
from plait.core_ir.ops.collective import STARTS, wait
from plait.core_ir.ops.linalg import dot_general
from plait.core_ir.schedule import Recipe, build, registry
from plait.core_ir.schedule.recipe import Request

DIM, LENGTH = 32, 4
FAST = replace(CPU_CORE, name="fast", inside=plait.Link(1e12))
SLOW = replace(CPU_CORE, name="slow", inside=plait.Link(1e6, 1000.0))


def weights(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / 4, jnp.float32)


BATCH = {"x": weights(8, DIM)}
PARAMS = {
    "up": weights(DIM, DIM),
    "down": weights(DIM, DIM),
    "after": weights(DIM, DIM),
    "chain": [weights(DIM, DIM) for _ in range(LENGTH)],
}


def cut_product(x: Any, up: Any, down: Any) -> Any:
    return jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor")


def loss_fn(params: Any, batch: Any) -> Any:
    """An exchange, and beside it a chain of products that needs none."""
    x = chain = batch["x"]
    over_ranks = jax.shard_map(
        cut_product,
        mesh=AbstractMesh((2,), ("tensor",)),
        in_specs=(P(), P(None, "tensor"), P("tensor")),
        out_specs=P(),
    )
    exchanged = over_ranks(x, params["up"], params["down"])
    for weight in params["chain"]:
        chain = jnp.tanh(chain @ weight)
    out = jnp.tanh(exchanged @ params["after"]) + chain
    return jnp.mean(plait.stage_boundary(out) ** 2)


@cache
def exchanging(hardware: plait.Hardware) -> plait.Pipeline:
    return plait.compile(
        loss_fn,
        PARAMS,
        BATCH,
        num_microbatches=2,
        mesh={"stage": 2, "tensor": 2},
        hardware=hardware,
    )


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))


def two_stages(**options: Any) -> plait.Pipeline:
    """Of a microbatch an activation crosses, and its gradient."""
    return plait.compile(
        lambda model, batch: model(batch["x"]).square().mean(),
        layers(),
        {"x": torch.ones(4, DIM)},
        split=["1"],
        **{"num_microbatches": 1, "schedule": "gpipe", "codegen": "eager", **options},
    )


def hidden_products(pipeline: plait.Pipeline) -> int:
    """The products between the start and the wait of the forward's exchange."""
    ops = [eqn.op for eqn in pipeline.program.task(0, "F").eqns]
    (start,) = [at for at, op in enumerate(ops) if op in STARTS]
    return ops[start : ops.index(wait)].count(dot_general)


def test_what_hides_an_exchange_depends_on_the_links() -> None:
    """Behind one that takes longer than all else stands the whole chain; one that takes next to no time needs less."""
    fast, slow = exchanging(FAST), exchanging(SLOW)
    assert hidden_products(slow) == LENGTH
    assert 0 < hidden_products(fast) < LENGTH
    assert (fast.hardware, slow.hardware) == (FAST, SLOW)


def test_results_do_not_depend_on_it() -> None:
    one, other = (exchanging(hardware).loss_and_grads(BATCH) for hardware in (FAST, SLOW))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_simulated_step_is_that_of_the_hardware() -> None:
    """One microbatch through two stages waits for two messages, one after the other."""
    plain = two_stages(hardware="cpu-core").simulate().makespan
    latency_us = CPU_CORE.inside.latency_us + 1000
    slower = replace(CPU_CORE, inside=replace(CPU_CORE.inside, latency_us=latency_us))
    simulated = two_stages(hardware=slower).simulate().makespan
    assert simulated - plain == pytest.approx(2e-3, rel=1e-6)


def test_a_mesh_says_which_ranks_are_on_several_nodes() -> None:
    """Of two ranks each: the two parts of a stage's batch, so that stages lie on different ones."""
    near = replace(CPU_CORE, between=CPU_CORE.inside, ranks_per_node=2)
    far = replace(near, between=replace(near.inside, latency_us=near.inside.latency_us + 1000))
    spans = [
        two_stages(hardware=hardware, mesh={"stage": 2, "data": 2}).simulate().makespan
        for hardware in (near, far)
    ]
    assert spans[1] - spans[0] == pytest.approx(2e-3, rel=1e-6)


def test_searches_are_for_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def search(request: Request) -> Any:
        seen.append(request.times)
        return build("gpipe", request.num_ranks, request.num_microbatches)

    recipe = Recipe("seeing", "", "0", "0", "", search)
    monkeypatch.setattr(registry, "_RECIPES", {**registry._RECIPES, recipe.name: recipe})
    for hardware in ("cpu-core", replace(CPU_CORE, flops_per_second={"f32": 1e3})):
        two_stages(hardware=hardware, schedule=recipe.name)
    flops = 2 * 4 * DIM * DIM
    assert seen[1].f[0] > flops / 1e3 > 1e3 * seen[0].f[0]


def test_passes_of_ones_own_may_ask_for_times() -> None:
    found: list[float] = []

    def products(program: Any, seconds: Callable[[Eqn], float]) -> Any:
        found.append(next(seconds(e) for e in program.task(0, "F").eqns if e.op is dot_general))
        return program

    def pairs(program: Any, pairs: Any, seconds: Callable[[Eqn], float]) -> Any:
        return products(program, seconds)

    def of_their_own(program: Any, seconds: Callable[[Eqn], float] = lambda eqn: -1.0) -> Any:
        return products(program, seconds)

    passes = plait.passes.Passes(
        program=(*plait.passes.PROGRAM_PASSES, products, of_their_own), scheduled=(pairs,)
    )
    slow = replace(CPU_CORE, flops_per_second={"f32": 1e3})
    two_stages(hardware=slow, passes=passes)
    flops = 2 * 4 * DIM * DIM
    assert found == [flops / 1e3, -1.0, flops / 1e3]


def test_names_and_files(tmp_path: Path) -> None:
    assert two_stages(hardware="h200").hardware is H200
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nbytes_per_second = 1e9\nmemory_bytes = 1e9\nranks_per_node = 8\n'
        "flops_per_second = { f32 = 1e9 }\n"
        "inside = { bytes_per_second = 1e9 }\nbetween = { bytes_per_second = 1e9 }\n"
    )
    for path in (file, str(file)):
        assert two_stages(hardware=path).hardware.name == "mine"


def test_a_device_is_taken_for_what_its_driver_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert two_stages().hardware is CPU_CORE
    monkeypatch.setattr(torch_engines, "device_name", lambda device: "NVIDIA H200")
    assert two_stages().hardware is H200
    assert two_stages(hardware="cpu-core").hardware is CPU_CORE
    monkeypatch.setattr(jax_engines, "device_name", lambda devices: "NVIDIA H100 80GB HBM3")
    assert two_stages(backend="jax", codegen=None).hardware is H100


def test_engines_ask_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert torch_engines.device_name(torch.device("cuda", 3)) == "GPU 3"
    assert torch_engines.device_name(torch.device("cpu")) is None
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    assert jax_engines.device_name((gpu,)) == "NVIDIA H200"  # type: ignore[arg-type]
    assert jax_engines.device_name(tuple(jax.devices("cpu"))) is None
