"""Flax models with sharding annotations, in a pipeline whose stages XLA partitions: the step that JAX computes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import plait
from plait.core_ir.errors import CaptureError, UnsupportedError, UsageError
from plait.core_ir.numerics import gradient_error, relative_error, tolerance
from plait.frontends.jax.reference import named_gradients, reference
from plait.models.llama import config as llama_config
from plait.models.llama import flax as llama

DIM, HIDDEN, ROWS = 8, 24, 8
LINE = r"test_annotated_models.py:\d+: "

Loss = Callable[[Any, Any], Any]


def tensor_mesh(size: int = 2) -> Mesh:
    """The mesh that the user of JAX annotates for."""
    return Mesh(np.array(jax.devices()[:size]), ("tensor",))


def laid(x: Any, *spec: Any, mesh: Mesh | None = None) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh or tensor_mesh(), P(*spec)))


class Block(nnx.Module):
    """A gated MLP block whose kernels are annotated, [B, D] -> [B, D]."""

    def __init__(self, mesh: Mesh, rngs: nnx.Rngs) -> None:
        def linear(num_in: int, num_out: int, *spec: Any) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec, mesh=mesh)
            return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=init, rngs=rngs)

        self.gate = linear(DIM, HIDDEN, None, "tensor")
        self.up = linear(DIM, HIDDEN, None, "tensor")
        self.down = linear(HIDDEN, DIM, "tensor", None)

    def __call__(self, x: Any) -> Any:
        return x + self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class MLP(nnx.Module):
    def __init__(self, num_blocks: int, mesh: Mesh) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(mesh, rngs) for _ in range(num_blocks)])


def mlp_loss(model: MLP, batch: Any) -> Any:
    """Cut between all blocks; no annotation but those of the kernels."""
    h = batch["x"]
    for number, block in enumerate(model.blocks):
        h = block(plait.stage_boundary(h) if number else h)
    return jnp.mean((h - batch["t"]) ** 2)


def mlp_batch(rows: int = ROWS) -> Any:
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal((rows, DIM)).astype(np.float32) for k in "xt"}


def check(
    loss: Loss, model: Any, batch: Any, *, num_microbatches: int, wanted: Any = None, **options: Any
) -> plait.Pipeline:
    """AssertionError unless a step gives the value and gradients of the loss itself; the pipeline."""
    pipeline = plait.compile(loss, model, batch, num_microbatches=num_microbatches, **options)
    assert pipeline.options.mesh is not None
    if wanted is None:
        wanted = reference(loss, model, batch, num_microbatches=num_microbatches)
    allowed = tolerance("f32", "framework")
    for _ in range(2):  # the second step is given what the first one was
        value, grads = pipeline.loss_and_grads(batch)
        assert relative_error(plait.to_numpy(value), wanted.loss) <= allowed.loss
        assert gradient_error(named_gradients(grads), wanted.grads) <= allowed.grads
    return pipeline


def products(text: str) -> set[str]:
    """The shapes of all products in compiled HLO."""
    return set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text))


def text_of(pipeline: plait.Pipeline, stage: int, kind: str) -> str:
    engine: Any = pipeline.engine
    return engine._plan.tasks[stage, kind].executable.as_text() or ""


MESHES = [
    ({"stage": 2, "tensor": 2}, "1f1b"),
    ({"tensor": 2, "stage": 2}, "dualpipev"),
    ({"stage": 2, "tensor": 4}, "dualpipev"),
    ({"stage": 2, "data": 2, "tensor": 2}, "1f1b"),
    ({"data": 2, "stage": 2, "tensor": 2}, "zbv"),
]


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
@pytest.mark.parametrize(("axes", "schedule"), MESHES)
def test_kernels_annotated_by_nnx(engine: str, axes: dict[str, int], schedule: str) -> None:
    mesh = tensor_mesh(axes["tensor"])
    model = MLP(2 if schedule == "1f1b" else 4, mesh)
    pipeline = check(
        mlp_loss,
        model,
        mlp_batch(16),
        num_microbatches=4,
        mesh=axes,
        schedule=schedule,
        engine=engine,
    )
    layout = pipeline.options.mesh
    assert layout is not None
    assert layout.auto_axes == ("tensor",)
    assert layout.data_axes == tuple(axis for axis in axes if axis == "data")
    # Each gradient lies as its parameter does.
    _, grads = pipeline.loss_and_grads(mlp_batch(16))
    kernels = zip(jax.tree.leaves(grads), jax.tree.leaves(nnx.state(model)), strict=True)
    assert all(grad.sharding == kernel.sharding for grad, kernel in kernels)


def test_products_are_partitioned() -> None:
    pipeline = check(
        mlp_loss,
        MLP(2, tensor_mesh()),
        mlp_batch(),
        num_microbatches=2,
        mesh={"stage": 2, "tensor": 2},
    )
    forward, own = text_of(pipeline, 1, "F"), HIDDEN // 2
    assert products(forward) == {f"4,{own}", f"4,{DIM}"}
    assert "all-reduce" in forward
    weights = text_of(pipeline, 1, "W")
    assert products(weights) <= {f"{DIM},{own}", f"{own},{DIM}"}
    assert "all-gather" not in weights  # each rank keeps its part of the gradients


def test_products_of_the_one_program_are_partitioned() -> None:
    pipeline = check(
        mlp_loss,
        MLP(2, tensor_mesh()),
        mlp_batch(),
        num_microbatches=2,
        mesh={"stage": 2, "tensor": 2},
        engine="spmd",
    )
    engine: Any = pipeline.engine
    text, own = engine.compiled_text(), HIDDEN // 2
    forward, weights = {f"4,{own}", f"4,{DIM}"}, {f"{DIM},{own}", f"{own},{DIM}"}
    assert products(text) == forward | weights
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_activations_annotated_alone() -> None:
    """Parameters lie whole; only the products say that they are cut."""

    def loss(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for number in range(2):
            h = plait.stage_boundary(h) if number else h
            h = laid(jnp.tanh(h @ params[f"up{number}"]), P.UNCONSTRAINED, "tensor")
            h = h @ params[f"down{number}"]
        return jnp.mean((h - batch["t"]) ** 2)

    rng = np.random.default_rng(1)
    params = {
        f"{name}{number}": jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)
        for number in range(2)
        for name, shape in (("up", (DIM, HIDDEN)), ("down", (HIDDEN, DIM)))
    }
    pipeline = check(loss, params, mlp_batch(), num_microbatches=2, mesh={"stage": 2, "tensor": 2})
    assert f"4,{HIDDEN // 2}" in products(text_of(pipeline, 0, "F"))
    assert "jax:sharding_constraint" in str(pipeline.program)


def test_a_batch_annotated_over_an_axis_is_whole_along_it() -> None:
    """The axis would be one of data, were it not named."""

    def loss(w: Any, x: Any) -> Any:
        x = lax.with_sharding_constraint(x, P("tensor"))
        h = plait.stage_boundary(jnp.tanh(x @ w["a"]))
        return jnp.mean(laid(h @ w["b"], "tensor") ** 2)

    w = {k: jnp.eye(DIM) + 0.1 for k in "ab"}
    with jax.set_mesh(tensor_mesh()):  # also while the step runs
        pipeline = check(
            loss, w, mlp_batch()["x"], num_microbatches=2, mesh={"stage": 2, "tensor": 2}
        )
    assert pipeline.options.mesh is not None
    assert pipeline.options.mesh.data_axes == ()
    assert products(text_of(pipeline, 0, "F")) == {f"2,{DIM}"}


def turned(w: Any, x: Any) -> Any:
    """Each device needs a part of what its neighbour has."""
    h = laid(jnp.tanh(plait.stage_boundary(x @ w["a"])), None, "tensor")
    return jnp.mean(laid(jnp.roll(h, 1, 1), None, "tensor") ** 2)


def test_a_permute_within_a_task_is_for_mpmd_alone() -> None:
    """XLA has all devices of a program meet in one, and those of another stage run another task."""
    mesh = {"stage": 2, "tensor": 2}
    pipeline = check(turned, W, X, num_microbatches=2, mesh=mesh)
    assert "collective-permute" in text_of(pipeline, 1, "F")
    refused(turned, UnsupportedError, "engine='spmd': .* use engine='mpmd'", engine="spmd")


W, X = {k: jnp.eye(DIM) + 0.1 for k in "ab"}, mlp_batch()["x"]


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
@pytest.mark.parametrize("axis_names", [{"model"}, {"model", "tensor"}])
def test_one_axis_mapped_and_another_annotated(engine: str, axis_names: set[str]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("model", "tensor"))
    mapped = jax.shard_map(
        lambda x, a, b: lax.psum(jnp.tanh(x @ a) @ b, "model"),
        mesh=mesh,
        in_specs=(P(), P(None, "model"), P("model")),
        out_specs=P(),
        axis_names=axis_names,
    )

    def loss(w: Any, x: Any) -> Any:
        h = plait.stage_boundary(mapped(x, w["a"], w["b"]))
        return jnp.mean(laid(h @ w["c"], None, "tensor", mesh=mesh) ** 2)

    w = {
        k: jnp.asarray(np.random.default_rng(2).normal(size=(DIM, DIM)), jnp.float32) for k in "abc"
    }
    axes = {"stage": 2, "model": 2, "tensor": 2}
    with jax.set_mesh(mesh):
        value, grads = jax.jit(jax.value_and_grad(loss))(w, X)
    pipeline = plait.compile(loss, w, X, num_microbatches=2, mesh=axes, engine=engine)
    got, got_grads = pipeline.loss_and_grads(X)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(got_grads[name], grad, rtol=1e-5, atol=1e-6, err_msg=name)
    layout = pipeline.options.mesh
    assert layout is not None
    assert (layout.named_axes, layout.auto_axes, layout.data_axes) == (("model",), ("tensor",), ())


@pytest.mark.parametrize("boxed", [False, True])
def test_linen_metadata(boxed: bool) -> None:
    """As boxes that the model unpacks under a mesh, which annotates; and unpacked, by where the arrays lie."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"), tensor_mesh())
    dense = nn.Dense(HIDDEN, use_bias=False, kernel_init=init)

    def loss(variables: Any, x: Any) -> Any:
        return jnp.mean(dense.apply(variables, plait.stage_boundary(jnp.tanh(x))) ** 2)

    variables = dense.init(jax.random.key(0), X)
    if not boxed:
        lies = NamedSharding(tensor_mesh(), P(None, "tensor"))
        variables = jax.device_put(nn.meta.unbox(variables), lies)
    pipeline = check(loss, variables, X, num_microbatches=2, mesh={"stage": 2, "tensor": 2})
    assert products(text_of(pipeline, 1, "F")) == {f"4,{HIDDEN // 2}"}


CONFIG = replace(llama_config.CONFIGS["tiny"], num_layers=2, seq_len=8, dim=32, hidden_dim=48)
COLUMNS, ROWS_OF = ("wq", "wk", "wv", "w1", "w3", "head"), ("wo", "w2", "tok_embed")


def sharded_llama() -> llama.Llama:
    """Heads, the MLP's inner dim and the vocabulary over "tensor", by the arrays themselves."""
    graphdef, state = nnx.split(llama.build(CONFIG))

    def placed(path: Sequence[Any], leaf: Any) -> Any:
        spec = P()
        if set(path) & {*COLUMNS}:
            spec = P(None, "tensor")
        elif set(path) & {*ROWS_OF}:
            spec = P("tensor")
        return leaf.replace(jax.device_put(leaf[...], NamedSharding(tensor_mesh(), spec)))

    flat = [(path, placed(path, leaf)) for path, leaf in nnx.to_flat_state(state)]
    model: llama.Llama = nnx.merge(graphdef, nnx.from_flat_state(flat))
    return model


def attend(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (laid(x, None, None, "tensor", None) for x in (q, k, v))
    return laid(llama.attend_causally(q, k, v), None, None, "tensor", None)


def llama_loss(model: llama.Llama, batch: Any) -> Any:
    x = laid(model.tok_embed(batch["tokens"]))
    cos, sin = llama.rotary_tables(CONFIG, x.shape[1], x)
    for number, layer in enumerate(model.layers):
        x = plait.stage_boundary(x) if number else x
        x = x + layer.attn(layer.attn_norm(x), cos, sin, attend)
        x = laid(x + layer.mlp(layer.mlp_norm(x)))
    logits = laid(model.head(model.norm(x)), None, None, "tensor")
    return llama.cross_entropy(logits.astype(jnp.float32), batch["targets"])


@pytest.mark.parametrize("engine", ["mpmd", "spmd"])
def test_llama(engine: str) -> None:
    batch = next(llama_config.batches(CONFIG, "train", 4, seed=0))
    wanted = reference(llama.loss_fn, llama.build(CONFIG), batch, num_microbatches=2)
    mesh = {"stage": 2, "tensor": 2}
    model = sharded_llama()
    pipeline = check(
        llama_loss, model, batch, num_microbatches=2, wanted=wanted, mesh=mesh, engine=engine
    )
    if engine == "mpmd":
        text = text_of(pipeline, 1, "F")
        local = {f"16,{CONFIG.hidden_dim // 2}", f"16,{CONFIG.vocab_size // 2}"}
        assert local <= products(text)
        assert f"16,{CONFIG.vocab_size}" not in products(text)


# What is refused.


def constrained(*spec: Any, mesh: Mesh | None = None) -> Loss:
    def loss(w: Any, x: Any) -> Any:
        h = plait.stage_boundary(laid(x @ w["a"], *spec, mesh=mesh))
        return jnp.mean((h @ w["b"]) ** 2)

    return loss


def refused(
    loss: Loss, error: type[Exception], message: str, model: Any = W, **options: Any
) -> None:
    options = {"mesh": {"stage": 2, "tensor": 2}, **options}
    with pytest.raises(error, match=message):
        plait.compile(loss, model, X, num_microbatches=2, **options)


def test_the_torch_backend_has_no_partitioning() -> None:
    refused(
        constrained(None, "tensor"),
        UnsupportedError,
        LINE + "a sharding annotation leaves axis 'tensor' to XLA's partitioning",
        backend="torch",
    )
    refused(
        lambda model, x: mlp_loss(model, {"x": x, "t": x}),
        UnsupportedError,
        r"how parameter 'blocks.0.down.kernel' lies leaves axis 'tensor' to XLA",
        model=MLP(2, tensor_mesh()),
        backend="torch",
    )


def test_an_annotation_of_nothing_is_refused_by_torch_too() -> None:
    refused(
        constrained(),
        UnsupportedError,
        LINE + ".*sharding_constraint",
        backend="torch",
        mesh={"stage": 2, "data": 1},
    )


def test_axes_that_the_mesh_does_not_have() -> None:
    loss = constrained(None, "tensor")
    lacks = (
        LINE + "a sharding annotation over axis 'tensor', which the mesh does not have; .* 'model'"
    )
    refused(loss, CaptureError, lacks, mesh={"stage": 2, "model": 2})
    refused(loss, CaptureError, LINE + ".*'tensor' of a mesh; pass the mesh", mesh=None)
    refused(
        loss,
        CaptureError,
        LINE + ".*2 ranks along axis 'tensor'; elsewhere there are 4",
        mesh={"stage": 2, "tensor": 4},
    )
    model = MLP(2, tensor_mesh())
    for block in model.blocks:
        for kernel in (block.gate.kernel, block.up.kernel, block.down.kernel):
            kernel.set_value(jnp.asarray(np.asarray(kernel[...])))
    refused(
        lambda model, x: mlp_loss(model, {"x": x, "t": x}),
        CaptureError,
        r"the metadata of parameter 'blocks.0.down.kernel' .* axis 'tensor', which the mesh does not have",
        model=model,
        mesh={"stage": 2, "model": 2},
    )


def test_the_axis_of_the_stages() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "tensor"))
    refused(
        constrained("stage", "tensor", mesh=mesh),
        CaptureError,
        LINE + "a sharding annotation over axis 'stage', along which the stages stand",
    )


def test_an_axis_that_is_mapped_too() -> None:
    def loss(w: Any, x: Any) -> Any:
        mapped = jax.shard_map(
            lambda w, x: lax.psum(x @ w, "tensor"),
            mesh=tensor_mesh(),
            in_specs=(P("tensor"), P(None, "tensor")),
            out_specs=P(),
        )
        return jnp.mean(laid(mapped(w["a"], x) @ w["b"], None, "tensor") ** 2)

    refused(
        loss,
        CaptureError,
        LINE + "a sharding annotation over axis 'tensor', over which the model's shard_map",
        mesh={"stage": 1, "tensor": 2},
    )


def test_an_axis_of_data() -> None:
    refused(
        constrained(None, "tensor"),
        UsageError,
        "data_axes names 'tensor', which .* a sharding annotation leaves to XLA's partitioning",
        data_axes=["tensor"],
    )
