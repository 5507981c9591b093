"""What each rank of a test of sharded parameters does; run by test_sharded.py, one process a rank."""

import copy
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from mesh_programs import mesh_of, tensor_parallel
from torch import Tensor, nn

import plait
from plait.backends.torch import engines
from plait.core_ir.schedule import build
from plait.passes import Passes, Sharding, shard_parameters

ROWS = 16


class Layer(nn.Module):
    """Rows that do not come out even over two or four ranks, a bias, a row alone, and a number."""

    def __init__(self, shared: nn.Parameter | None = None) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(5, 6) * 0.4)
        self.narrow = nn.Parameter(torch.randn(6, 5) * 0.4)
        self.bias = nn.Parameter(torch.randn(6) * 0.1)
        self.row = nn.Parameter(torch.randn(1, 5) * 0.1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shared = nn.Parameter(torch.randn(7, 5) * 0.3) if shared is None else shared

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.wide + self.bias) @ self.narrow
        return x + self.scale * h + self.row + torch.tanh(x @ self.shared.T) @ self.shared


def layers(num_layers: int, *, shared: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    first = Layer()
    rest = [Layer(first.shared if shared else None) for _ in range(num_layers - 1)]
    return nn.Sequential(first, *rest)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return cast("Tensor", model(x).float().square().mean())


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def compiled(model: nn.Module, mesh: dict[str, int], **options: Any) -> plait.Pipeline:
    options = {"codegen": "eager", "num_microbatches": 4, "schedule": "1f1b", **options}
    if options["schedule"] in ("interleaved-1f1b", "dualpipev", "zbv", "looped-bfs"):
        options["split"] = ["1", "2", "3"]
    elif mesh["stage"] == 2:
        options["split"] = ["2"]
    return plait.compile(loss_fn, model, batch(model[0].wide.dtype), mesh=mesh, **options)  # type: ignore[index, union-attr]


def number(mesh: dict[str, int], axis: str) -> int:
    """This rank's place along an axis."""
    place, rank = {}, dist.get_rank()
    for name, size in reversed(mesh.items()):
        rank, place[name] = divmod(rank, size)
    return place[axis]


def own_rows(x: Tensor, mesh: dict[str, int], axis: str) -> Tensor:
    """What this rank holds of a parameter: chunks as torch.chunk makes them; all where there are too few rows."""
    if not x.ndim or len(x) < mesh[axis]:
        return x
    chunks = [*x.chunk(mesh[axis]), *[x[:0]] * mesh[axis]]
    return chunks[number(mesh, axis)]


def equals_replicas(
    mesh: dict[str, int],
    sharding: Sharding,
    model: nn.Module | None = None,
    *,
    exact: bool = True,
    **options: Any,
) -> None:
    """Two steps with an optimizer give, row for row, the bits that the same mesh gives without shards."""
    model = layers(4) if model is None else model
    x, axis = batch(next(model.parameters()).dtype), sharding.axis
    plain = compiled(copy.deepcopy(model), mesh, **options)
    sharded = compiled(copy.deepcopy(model), mesh, passes=Passes(sharding=sharding), **options)
    held, whole = dict(sharded.named_parameters()), dict(plain.named_parameters())
    assert held.keys() == whole.keys()
    is_cut = {name for name in held if held[name].shape != whole[name].shape}
    assert any("wide" in name for name in is_cut)
    assert not any(name.endswith((".row", ".scale")) for name in is_cut)

    def same(found: Tensor, wanted: Tensor, name: str) -> None:
        wanted = own_rows(wanted, mesh, axis)
        assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
        assert found.dtype == wanted.dtype, name
        if exact:
            assert torch.equal(found, wanted), (name, found, wanted)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)

    loss, grads = sharded.loss_and_grads(x)
    wanted_loss, wanted = plain.loss_and_grads(x)
    assert torch.equal(loss, wanted_loss)
    assert torch.equal(sharded.forward(x), plain.forward(x))
    for name, grad in grads.items():
        if wanted[name] is not None:
            same(grad, wanted[name], name)
        else:
            assert grad is None, name
    optimizers = [torch.optim.AdamW(p.parameters(), lr=0.1) for p in (sharded, plain)]
    for _ in range(2):
        assert torch.equal(sharded.step(x), plain.step(x)) or not exact
        for name, parameter in held.items():
            if parameter.requires_grad:
                same(parameter.grad, whole[name].grad, name)  # type: ignore[arg-type]
        norms = [pipeline.clip_grad_norm_(0.5) for pipeline in (sharded, plain)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        if exact:  # the norms are summed in another order, by which all is scaled
            for name, parameter in held.items():
                if parameter.requires_grad:
                    grad = own_rows(whole[name].grad, mesh, axis)  # type: ignore[arg-type]
                    torch.testing.assert_close(parameter.grad, grad, rtol=1e-5, atol=1e-7)
                    parameter.grad.copy_(grad)  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in held.items():
            same(parameter.detach(), whole[name].detach(), name)
    state, wanted_state = sharded.state_dict(), plain.state_dict()
    assert state.keys() == wanted_state.keys()
    for name, x_ in state.items():
        same(x_, wanted_state[name], name)


MESH = {"stage": 2, "data": 2}


def schedules() -> None:
    for schedule, reshard in (
        ("1f1b", "after_backward"),
        ("interleaved-1f1b", "after_forward"),
        ("looped-bfs", "after_forward"),
        ("dualpipev", "after_backward"),
    ):
        equals_replicas(MESH, Sharding("data", reshard=reshard), schedule=schedule)  # type: ignore[arg-type]


def buckets() -> None:
    for num_bytes in (0, 200):
        equals_replicas(MESH, Sharding("data", bucket_bytes=num_bytes), schedule="zb-h1")


def inductor() -> None:
    equals_replicas(MESH, Sharding("data"), codegen="inductor", schedule="zb-h1")


def shared() -> None:
    """A parameter of all stages, its partial gradients added by stage."""
    for schedule in ("1f1b", "interleaved-1f1b"):
        equals_replicas(MESH, Sharding("data"), layers(4, shared=True), schedule=schedule)


def frozen() -> None:
    model = layers(4)
    model[0].requires_grad_(False)
    model[2].wide.requires_grad_(False)  # type: ignore[union-attr]
    equals_replicas(MESH, Sharding("data"), model, schedule="interleaved-1f1b")


def some_stages() -> None:
    """Stage 1 alone is sharded, and a parameter that stage 0 has too stays whole."""
    model = layers(4, shared=True)
    pipeline = compiled(model, MESH, passes=Passes(sharding=Sharding("data", stages=[1])))
    cut = {name.split(".")[0] for name in pipeline.program.shard_types}
    assert cut == {"2", "3"}, cut
    assert "0.shared" not in pipeline.program.shard_types
    plain = compiled(copy.deepcopy(model), MESH)
    _, grads = pipeline.loss_and_grads(batch())
    _, wanted = plain.loss_and_grads(batch())
    for name, grad in grads.items():
        if grad is not None:
            is_cut = name in pipeline.program.shard_types
            want = own_rows(wanted[name], MESH, "data") if is_cut else wanted[name]
            assert torch.equal(grad, want), name


def wide_reduction() -> None:
    """bf16 parameters, gradients summed in f32: of two ranks, rounded once either way."""
    model = layers(4).to(torch.bfloat16)
    equals_replicas(MESH, Sharding("data", reduce_dtype="f32"), model)
    # Of f32 parameters in bf16: what each rank has is rounded, then the sum.
    pipeline = compiled(
        layers(4), MESH, passes=Passes(sharding=Sharding("data", reduce_dtype="bf16"))
    )
    _, grads = pipeline.loss_and_grads(batch())
    for name, grad in grads.items():
        if grad is not None:
            assert torch.equal(grad, grad.to(torch.bfloat16).to(grad.dtype)), name


def four() -> None:
    """Four shards of five, six and seven rows: the last rank may have none. Sums are in another order."""
    equals_replicas({"stage": 1, "data": 4}, Sharding("data"), exact=False)


def hybrid() -> None:
    """Shards along one data axis, replicas of them along another."""
    equals_replicas({"replica": 2, "stage": 1, "data": 2}, Sharding("data"), exact=False)


def on_meta() -> None:
    """A model without content: a rank's memory is that of its shards, loaded from whole values."""
    source = layers(4)
    with torch.device("meta"):
        empty = layers(4)
    pipeline = compiled(empty, MESH, passes=Passes(sharding=Sharding("data")))
    held = sum(p.numel() for p in pipeline.parameters())
    stage = number(MESH, "stage")
    whole = {n: p for n, p in source.named_parameters() if int(n[0]) // 2 == stage}
    assert held == sum(own_rows(p, MESH, "data").numel() for p in whole.values())
    pipeline.load_state_dict(source.state_dict())
    for name, parameter in pipeline.named_parameters():
        assert torch.equal(parameter, own_rows(whole[name], MESH, "data")), name
    plain = compiled(copy.deepcopy(source), MESH)
    assert torch.equal(pipeline.step(batch()), plain.step(batch()))
    # What was saved by rank is loaded as it was.
    saved = {name: x.clone() for name, x in pipeline.state_dict().items()}
    for parameter in pipeline.parameters():
        parameter.data.zero_()
    pipeline.load_state_dict(saved)
    assert torch.equal(pipeline.forward(batch()), plain.forward(batch()))
    short = {name: x[:-1] if "wide" in name else x for name, x in saved.items()}
    raises(
        lambda: pipeline.load_state_dict(short), "has shape .* \\(or whole f32\\[5, 6\\]\\), got"
    )


def jax_model() -> None:
    """A JAX model: parameters are given whole, and so are the gradients."""
    rng = torch.Generator().manual_seed(2)
    params = {f"w{n}": torch.randn(5, 5, generator=rng).numpy() for n in range(2)}
    x = batch().numpy()

    def loss(p: Any, x: Any) -> Any:
        return (jnp.tanh(plait.stage_boundary(jnp.tanh(x @ p["w0"])) @ p["w1"]) ** 2).mean()

    pipeline = plait.compile(
        loss,
        params,
        x,
        backend="torch",
        codegen="eager",
        num_microbatches=4,
        mesh=MESH,
        passes=Passes(sharding=Sharding("data")),
    )
    found, grads = pipeline.loss_and_grads(x)
    wanted, wanted_grads = jax.value_and_grad(loss)(params, x)
    torch.testing.assert_close(found, torch.tensor(float(wanted)), rtol=1e-5, atol=0)
    here = {name: grad for name, grad in grads.items() if grad is not None}
    assert len(here) == 1
    for name, grad in here.items():
        torch.testing.assert_close(
            grad, torch.tensor(wanted_grads[name].__array__()), rtol=1e-5, atol=1e-6
        )


def parts_of_parts() -> None:
    """Parameters that another axis cuts already, given whole: so are the gradients."""
    made = tensor_parallel(
        1, mesh_of({"data": 2, "stage": 1, "model": 2}, data=["data"], named=["model"])
    )
    program = shard_parameters(made.program, Sharding("data"), 2)
    engine = engines.build(
        program,
        build("1f1b", 1, 4),
        engine="distributed",
        device=torch.device("cpu"),
        codegen="eager",
        mesh=made.mesh,
        layouts=made.layouts,
    )
    inputs = made.inputs(4)
    made.check(engine.run(inputs), inputs)


def mistakes() -> None:
    model = layers(4)
    pipeline = compiled(model, MESH, passes=Passes(sharding=Sharding("data")))
    with torch.no_grad():
        model[0].wide.add_(1)  # type: ignore[operator, union-attr]
        model[2].wide.add_(1)  # type: ignore[operator, union-attr]
    raises(
        lambda: pipeline.step(batch()), "of the model was changed, but the pipeline trains shards"
    )
    raises(
        lambda: compiled(model, MESH, passes=Passes(sharding=Sharding("tensor"))),
        r"Sharding\('tensor'\): .*these are 'data'",
    )


def profiled() -> None:
    pipeline = compiled(layers(4), MESH, passes=Passes(sharding=Sharding("data")))
    times = pipeline.profile(batch())
    assert all(seconds > 0 for kind in (times.unshard, times.reduce_grad) for seconds in kind)  # type: ignore[union-attr]
    timeline = pipeline.simulate()
    assert timeline.transfers is not None
    assert (timeline.transfers.edge < 0).sum() == 4
    assert pipeline.measure(batch()).makespan > 0


def raises(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(plait.PlaitError, match=message):
        call()


RUNS: dict[str, Callable[[], None]] = {
    run.__name__: run
    for run in (
        *(schedules, buckets, inductor, shared, frozen, some_stages, wide_reduction, four, hybrid),
        *(on_meta, jax_model, parts_of_parts, mistakes, profiled),
    )
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for what in sys.argv[1:]:
        RUNS[what]()
    dist.barrier()
    dist.destroy_process_group()
    print("done")
