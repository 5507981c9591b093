"""Sharded parameters in one process, from both frontends: the results of the same mesh without shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from case_runs import Run, numpy_tree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_programs import mesh_of, tensor_parallel

import plait
from plait.backends.jax import engines as jax_engines
from plait.backends.runtime import Engine
from plait.backends.torch import engines as torch_engines
from plait.core_ir.arrays import to_numpy
from plait.core_ir.schedule import build
from plait.passes import Passes, Sharding, shard_parameters

ENGINES = ("local", "mpmd", "spmd")
X = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
SHAPES = {"w": (3, 9), "v": (9, 3), "bias": (1, 3), "scale": ()}
"""Rows that do not come out even over two and over four ranks; a row, and a number, that stay whole."""
PARAMS = {
    f"{name}{s}": np.random.default_rng(10 * s + n).normal(size=shape)
    for s in range(4)
    for n, (name, shape) in enumerate(SHAPES.items())
}


def loss_fn(p: Any, batch: Any) -> Any:
    """Four stages; the first's parameter is the last's too."""
    tanh = torch.tanh if isinstance(batch, torch.Tensor) else jnp.tanh
    h = batch
    for s in range(4):
        h = h + tanh(h @ p[f"w{s}"]) @ p[f"v{s}"] * p[f"scale{s}"] + p[f"bias{s}"]
        h = plait.stage_boundary(h) if s < 3 else h @ p["w0"]
    return (h * h).mean()


def compiled(run: Run, mesh: dict[str, int], **options: Any) -> plait.Pipeline:
    model = run.model(PARAMS)
    return run.compile(loss_fn, model, run.array(X), num_microbatches=4, mesh=mesh, **options)


CASES = [
    ("1f1b", {"stage": 4, "data": 2}, Sharding("data")),
    ("zbv", {"data": 2, "stage": 2}, Sharding("data", bucket_bytes=0)),
    ("interleaved-1f1b", {"stage": 2, "data": 4}, Sharding("data", "after_forward")),
    ("dualpipev", {"replica": 2, "stage": 2, "data": 2}, Sharding("data", "after_forward")),
    ("interleaved-1f1b", {"stage": 2, "data": 2}, Sharding("data", stages=[1, 2])),
]


@pytest.mark.parametrize(("schedule", "mesh", "sharding"), CASES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", ["torch", "jax"])
def test_shards_change_nothing(
    source: str, engine: str, schedule: str, mesh: dict[str, int], sharding: Sharding
) -> None:
    run = Run(source, engine, schedule)
    sharded = compiled(run, mesh, passes=Passes(sharding=sharding))
    assert "v1" in sharded.program.shard_types
    assert not {"bias1", "scale1"} & sharded.program.shard_types.keys()
    plain = compiled(run, mesh)
    loss, grads = numpy_tree(sharded.loss_and_grads(run.array(X)))
    wanted_loss, wanted = numpy_tree(plain.loss_and_grads(run.array(X)))
    np.testing.assert_array_equal(loss, wanted_loss)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert grad.shape == PARAMS[name].shape
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(to_numpy(sharded.forward(run.array(X))), wanted_loss)


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_gradients_lie_as_the_parameters_do(engine: str) -> None:
    """A JAX user holds parameters sharded, and the optimizer's state and the gradients lie beside them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))
    shape = (4, 4)
    params = {
        f"w{s}": jax.device_put(
            np.full(shape, 0.1 * (s + 1), np.float32), NamedSharding(mesh, P("data"))
        )
        for s in range(2)
    }

    def loss(p: Any, x: Any) -> Any:
        return ((plait.stage_boundary(jnp.tanh(x @ p["w0"])) @ p["w1"]) ** 2).mean()

    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    pipeline = plait.compile(
        loss,
        params,
        x,
        num_microbatches=2,
        mesh=mesh,
        engine=engine,
        passes=Passes(sharding=Sharding("data")),
    )
    found, grads = pipeline.loss_and_grads(x)
    wanted, wanted_grads = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for name, grad in grads.items():
        assert grad.sharding.is_equivalent_to(params[name].sharding, 2)
        np.testing.assert_allclose(grad, wanted_grads[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("source", "engine"), [("torch", "local"), ("jax", "mpmd")])
def test_steps_are_timed(source: str, engine: str) -> None:
    run = Run(source, engine, "zbv")
    pipeline = compiled(run, {"stage": 2, "data": 2}, passes=Passes(sharding=Sharding("data")))
    assert pipeline.profile(run.array(X)).f
    assert pipeline.measure(run.array(X)).makespan > 0
    assert pipeline.simulate().makespan > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        ({"data": 3, "stage": 1, "model": 2}, "1f1b"),
        ({"model": 2, "stage": 2, "data": 2}, "zbv"),
    ],
)
def test_parts_that_another_axis_cuts_are_cut_again(
    engine: str, axes: dict[str, int], schedule: str
) -> None:
    """Four rows of each of two parts, over two ranks, and over three, where they do not come out even."""
    num_stages = axes["stage"] * (2 if schedule == "zbv" else 1)
    made = tensor_parallel(num_stages, mesh_of(axes, data=["data"], named=["model"]))
    program = shard_parameters(made.program, Sharding("data"), axes["data"])
    assert any(layout[0] and name in program.shard_types for name, layout in made.layouts.items())
    chosen = build(schedule, axes["stage"], 4)
    options: dict[str, Any] = {"mesh": made.mesh, "layouts": made.layouts, "engine": engine}
    runs: Engine
    if engine == "local":
        options |= {"device": torch.device("cpu"), "codegen": "eager"}
        runs = torch_engines.build(program, chosen, **options)
    else:
        options |= {"device": tuple(jax.devices()), "codegen": None}
        runs = jax_engines.build(program, chosen, **options)
    inputs = made.inputs(4)
    outputs = runs.run(inputs)
    made.check(outputs, inputs)


def test_parameters_that_xla_cuts() -> None:
    """Annotated parameters, one of them by the dim of its rows: the shards are what the data axis cuts."""
    tensor = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))

    def laid(x: Any, *over: str | None) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(tensor, P(*over)))

    def loss(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ laid(p["up0"], None, "tensor")) @ laid(p["down0"], "tensor", None)
        h = plait.stage_boundary(x + h)
        h = jnp.tanh(h @ laid(p["up1"], None, "tensor")) @ laid(p["down1"], "tensor", None)
        return (h**2).mean()

    rng = np.random.default_rng(0)
    shapes = {"up0": (5, 6), "down0": (6, 5), "up1": (5, 6), "down1": (6, 5)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    x = rng.normal(size=(8, 5)).astype(np.float32)
    pipeline = plait.compile(
        loss,
        params,
        x,
        num_microbatches=2,
        mesh={"stage": 2, "data": 2, "tensor": 2},
        passes=Passes(sharding=Sharding("data")),
    )
    assert pipeline.program.shard_types.keys() == params.keys()
    wanted, wanted_grads = jax.value_and_grad(loss)(params, x)
    for _ in range(2):
        found, grads = pipeline.loss_and_grads(x)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, wanted_grads[name], rtol=1e-4, atol=1e-6)
