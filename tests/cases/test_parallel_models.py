"""JAX models that are mapped over axes of the mesh, on both JAX engines, against `jax.value_and_grad` of the loss."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from case_runs import numpy_tree
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import plait
from plait.core_ir.numerics import gradient_error, relative_error, tolerance

ENGINES = ("mpmd", "spmd")
WIDTH, HIDDEN, NUM_MICROBATCHES = 6, 8, 4
RNG = np.random.default_rng(0)
BATCH = {name: RNG.normal(size=(32, WIDTH)).astype(np.float32) for name in ("x", "t")}

both = pytest.mark.parametrize("engine", ENGINES)


def random(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape) * 0.5, jnp.float32)


def mapped(function: Callable[..., Any], axis: str, in_specs: Any, out_specs: Any) -> Any:
    """The function over an axis of two, as the user maps it."""
    mesh = jax.make_mesh((2,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


class Block(nnx.Module):
    """h + tanh(h @ up) @ down + bias, its hidden width cut over the axis "model"."""

    def __init__(self) -> None:
        self.up = nnx.Param(random(WIDTH, HIDDEN))
        self.down = nnx.Param(random(HIDDEN, WIDTH))
        self.bias = nnx.Param(random(WIDTH))

    def __call__(self, h: Any) -> Any:
        def layer(up: Any, down: Any, h: Any) -> Any:
            return lax.psum(jnp.tanh(h @ up) @ down, "model")

        cut = mapped(layer, "model", (P(None, "model"), P("model"), P()), P())
        out: Any = h + cut(self.up[...], self.down[...], h) + self.bias
        return out


class Stack(nnx.Module):
    """Blocks, a stage each."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = nnx.List([Block() for _ in range(num_blocks)])


def stack_loss(model: Stack, batch: Mapping[str, Any]) -> Any:
    h = batch["x"]
    for number, block in enumerate(model.blocks):
        h = block(plait.stage_boundary(h) if number else h)
    return jnp.mean((h - batch["t"]) ** 2)


def moe(p: Any, x: Any) -> Any:
    """Tokens, cut over the axis "expert", go to the experts by weight and back."""
    scores = jax.nn.softmax(x @ p["gate"])
    slots = scores.T[:, :, None] * x
    slots = lax.all_to_all(slots, "expert", 0, 1, tiled=True)
    slots = jnp.tanh(slots @ p["up"]) @ p["down"]
    return x + lax.all_to_all(slots, "expert", 1, 0, tiled=True).sum(0)


EXPERTS = [
    {
        "gate": random(WIDTH, 4),
        "up": random(4, WIDTH, HIDDEN),
        "down": random(4, HIDDEN, WIDTH),
    }
    for _ in range(4)
]


def experts_loss(model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """Each layer a stage; aux is the error of each row."""
    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}
    layer = mapped(moe, "expert", (specs, P("expert")), P("expert"))
    h = batch["x"]
    for number, p in enumerate(model):
        h = layer(p, plait.stage_boundary(h) if number else h)
    error = jnp.sum((h - batch["t"]) ** 2, -1)
    return jnp.mean(error), error


def check(loss: Any, grads: Any, wanted: Any) -> None:
    """AssertionError unless loss and gradients are those that JAX gives."""
    allowed = tolerance("f32", "framework")
    wanted_loss, wanted_grads = numpy_tree(wanted)
    assert relative_error(np.asarray(loss), wanted_loss) <= allowed.loss
    assert jax.tree.structure(grads) == jax.tree.structure(wanted[1])
    named = [
        {str(number): np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(tree))}
        for tree in (grads, wanted_grads)
    ]
    assert gradient_error(*named) <= allowed.grads


def compiled(loss_fn: Any, model: Any, engine: str, **options: Any) -> plait.Pipeline:
    return plait.compile(
        loss_fn, model, BATCH, num_microbatches=NUM_MICROBATCHES, engine=engine, **options
    )


@both
@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        ("1f1b", {"stage": 4, "model": 2}),
        ("zbv", {"model": 2, "stage": 2}),
        ("dualpipev", {"data": 2, "stage": 2, "model": 2}),
    ],
)
def test_a_tensor_parallel_flax_model(engine: str, schedule: str, mesh: dict[str, int]) -> None:
    model = Stack(4)
    pipeline = compiled(stack_loss, model, engine, schedule=schedule, mesh=mesh)
    loss, grads = pipeline.loss_and_grads(BATCH)
    check(loss, grads, nnx.jit(nnx.value_and_grad(stack_loss))(model, BATCH))
    assert relative_error(np.asarray(pipeline.forward(BATCH)), np.asarray(loss)) <= 1e-6


@both
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_experts_that_exchange_tokens(engine: str, schedule: str) -> None:
    model = EXPERTS[:2] if schedule == "1f1b" else EXPERTS
    pipeline = compiled(
        experts_loss,
        model,
        engine,
        schedule=schedule,
        mesh={"stage": 2, "data": 2, "expert": 2},
        has_aux=True,
    )
    assert len(pipeline.captured.layouts) == 2 * len(model)
    (loss, aux), grads = pipeline.loss_and_grads(BATCH)
    (wanted_loss, errors), wanted = jax.jit(jax.value_and_grad(experts_loss, has_aux=True))(
        model, BATCH
    )
    check(loss, grads, (wanted_loss, wanted))
    np.testing.assert_allclose(np.ravel(aux), errors, rtol=1e-5)


@both
def test_steps_of_an_optimizer_on_parameters_that_lie_over_devices(engine: str) -> None:
    """Each gradient lies as its parameter does, so that what is computed of both stays there."""
    grid = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(grid, ("stage", "data", "expert"))
    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}
    model = [
        {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in p.items()}
        for p in EXPERTS[:2]
    ]
    pipeline = compiled(experts_loss, model, engine, mesh=mesh, has_aux=True)

    def updated(model: Any, grads: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)

    plain = EXPERTS[:2]
    for _ in range(2):
        (loss, _), grads = pipeline.loss_and_grads(BATCH, model)
        (wanted_loss, _), wanted = jax.jit(jax.value_and_grad(experts_loss, has_aux=True))(
            plain, BATCH
        )
        check(loss, grads, (wanted_loss, wanted))
        for w, g in zip(jax.tree.leaves(model), jax.tree.leaves(grads), strict=True):
            assert g.sharding == w.sharding
        model, plain = updated(model, grads), updated(plain, wanted)


def test_times_of_a_step() -> None:
    pipeline = compiled(
        stack_loss, Stack(4), "mpmd", schedule="auto", mesh={"stage": 2, "data": 2, "model": 2}
    )
    pipeline.profile(BATCH)
    assert pipeline.measure(BATCH).makespan > 0
    assert pipeline.loss_and_grads(BATCH)


def test_too_few_devices_say_how_to_get_them() -> None:
    with pytest.raises(plait.PlaitError, match="xla_force_host_platform_device_count=16"):
        compiled(stack_loss, Stack(4), "mpmd", mesh={"stage": 4, "data": 2, "model": 2})


@both
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_state_that_is_alike_on_all_ranks(engine: str, schedule: str) -> None:
    """A running mean over microbatches, which the next one reads."""

    def layer(p: Any, h: Any) -> Any:
        return lax.psum(jnp.tanh(h @ p["up"]) @ p["down"], "model")

    def loss_fn(model: Any, batch: Mapping[str, Any], state: Any) -> tuple[Any, Any]:
        cut = mapped(layer, "model", ({"up": P(None, "model"), "down": P("model")}, P()), P())
        h, after = batch["x"], {}
        for number, p in enumerate(model):
            h = cut(p, plait.stage_boundary(h) if number else h) - state[str(number)]
            mean = lax.stop_gradient(h.mean(0))
            after[str(number)] = 0.9 * state[str(number)] + 0.1 * mean
        return jnp.mean((h - batch["t"]) ** 2), after

    model = [{"up": random(WIDTH, HIDDEN), "down": random(HIDDEN, WIDTH)} for _ in range(4)]
    state = {str(number): random(WIDTH) for number in range(4)}
    mesh = {"stage": 2, "model": 2}
    pipeline = compiled(loss_fn, model, engine, schedule=schedule, mesh=mesh, state=state)
    loss, grads = pipeline.loss_and_grads(BATCH)
    step = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    losses, wanted = [], jax.tree.map(jnp.zeros_like, model)
    for m in range(NUM_MICROBATCHES):
        (own, state), grad = step(
            model, {k: x[8 * m : 8 * (m + 1)] for k, x in BATCH.items()}, state
        )
        losses.append(own / NUM_MICROBATCHES)
        wanted = jax.tree.map(lambda total, g: total + g / NUM_MICROBATCHES, wanted, grad)
    check(loss, grads, (sum(losses), wanted))
    for name, mean in state.items():
        np.testing.assert_allclose(np.asarray(pipeline.state[name]), mean, rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("mesh", [{"stage": 3}, {"stage": 3, "data": 2}], ids=str)
def test_a_parameter_that_the_first_of_its_stages_gives_no_gradient_of(
    engine: str, mesh: dict[str, int]
) -> None:
    def loss_fn(p: Any, batch: Mapping[str, Any]) -> Any:
        h = jnp.tanh(batch["x"] @ lax.stop_gradient(p["w"]) * p["scale"])
        h = jnp.tanh(plait.stage_boundary(h) @ p["w"])
        return jnp.mean((plait.stage_boundary(h) @ p["w"] - batch["t"]) ** 2)

    model = {"w": random(WIDTH, WIDTH), "scale": random(WIDTH)}
    pipeline = compiled(loss_fn, model, engine, mesh=mesh)
    assert pipeline.program.shared_params == {"w": (0, 1, 2)}
    loss, grads = pipeline.loss_and_grads(BATCH)
    check(loss, grads, jax.value_and_grad(loss_fn)(model, BATCH))
