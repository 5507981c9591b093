"""What each rank of a distributed test does; run by tests/backends/torch/test_distributed.py, one process a rank."""

import dataclasses
import itertools
import os
import signal
import sys
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.backends.order import awaited, tasks_of
from plait.backends.torch.clock import clock_offset
from plait.backends.torch.process_group import group
from plait.core_ir.program import TaskKind
from plait.core_ir.schedule import Recipe, build, recipes, register
from plait.models.llama import torch as llama
from plait.models.llama.config import CONFIGS, batches

CONFIG = dataclasses.replace(CONFIGS["tiny"], tied_head=True, seq_len=16)
RANK = int(os.environ.get("RANK", "0"))
NUM_MICROBATCHES = 4


def batch() -> dict[str, Any]:
    return {k: torch.tensor(v) for k, v in next(batches(CONFIG, "train", 8, seed=0)).items()}


def compiled(model: nn.Module, schedule: str = "zb-h1", **options: Any) -> plait.Pipeline:
    stages = dist.get_world_size()
    return plait.compile(
        llama.loss_fn,
        model,
        batch(),
        split=[f"layers.{i}" for i in CONFIG.cuts(stages)],
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        codegen="eager",
        **options,
    )


def reference() -> tuple[float, nn.Module]:
    model = llama.build(CONFIG, seed=0)
    loss = llama.loss_fn(model, batch())
    loss.backward()
    return float(loss.detach()), model


def steps() -> None:
    """Two optimizer steps under each schedule equal the unpipelined model's."""
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        model = llama.build(CONFIG, seed=0)
        pipeline = compiled(model, schedule)
        plain = llama.build(CONFIG, seed=0)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        names = [name for name, _ in pipeline.named_parameters()]
        for _ in range(2):
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            loss = pipeline.step(batch())
            plain_loss = llama.loss_fn(plain, batch())
            plain_loss.backward()
            torch.testing.assert_close(loss, plain_loss.detach(), rtol=1e-5, atol=0)
            norm = pipeline.clip_grad_norm_(1.0)
            plain_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            torch.testing.assert_close(norm, plain_norm, rtol=1e-5, atol=0)
            optimizer.step()
            plain_optimizer.step()
        wanted = dict(plain.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
        tied = dict(pipeline.named_parameters()).get("tok_embed.weight")
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (names, tied))
        assert {n for own, _ in everywhere for n in own} == set(wanted)
        holders = [rank for rank, (_, copy) in enumerate(everywhere) if copy is not None]
        assert holders == [
            0,
            dist.get_world_size() - 1,
        ]  # tied: the embedding's and the head's rank
        assert torch.equal(everywhere[0][1], everywhere[-1][1])


def schedules(codegen: str, num_microbatches: str) -> None:
    """Every schedule gives the bits of the microbatches run one after the other, with skips and a shared parameter."""
    num_ranks, count = dist.get_world_size(), int(num_microbatches)
    data = {"x": torch.randn(2 * count, 4, generator=torch.Generator().manual_seed(1))}

    def compiled(num_stages: int, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        pipeline = plait.compile(
            tanh_loss(num_stages),
            tanh_layers(num_stages),
            data,
            num_microbatches=count,
            codegen=codegen,
            **options,
        )
        loss, grads = pipeline.loss_and_grads(data)
        own = {s for s, rank in enumerate(pipeline.schedule.placement) if rank == RANK}
        own |= {0} if num_stages - 1 in own else set()
        if options.get("engine") != "local":
            assert {n for n, g in grads.items() if g is not None} == {f"w{s}" for s in own}
        return loss, {name: grad for name, grad in grads.items() if grad is not None}

    plain = {
        num_stages: compiled(num_stages, schedule="gpipe", engine="local")
        for num_stages in (num_ranks, 2 * num_ranks)
    }
    for recipe in recipes():
        num_stages = num_ranks * recipe.stages_per_rank
        loss, grads = compiled(num_stages, schedule=recipe.name, num_ranks=num_ranks)
        plain_loss, plain_grads = plain[num_stages]
        assert torch.equal(loss, plain_loss), recipe.name
        for name, grad in grads.items():
            assert torch.equal(grad, plain_grads[name]), (recipe.name, name)
    model = tanh_layers(num_ranks)
    loss = tanh_loss(num_ranks)(model, data)
    loss.backward()
    torch.testing.assert_close(plain[num_ranks][0], loss.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(plain[num_ranks][1][name], parameter.grad, rtol=1e-5, atol=1e-6)


def tanh_layers(num_stages: int) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(0)
    weights = {f"w{s}": torch.randn(4, 4, generator=generator) for s in range(num_stages)}
    return nn.ParameterDict({name: nn.Parameter(weight) for name, weight in weights.items()})


def tanh_loss(num_stages: int) -> Any:
    """Of stages h -> tanh(h @ w); the last also reads what the first made, and the first's parameter."""

    def loss_fn(p: Any, batch: Any) -> torch.Tensor:
        h = first = torch.tanh(batch["x"] @ p["w0"])
        for stage in range(1, num_stages):
            h = plait.stage_boundary(h)
            h = torch.tanh(h @ p[f"w{stage}"])
        return ((h + first) @ p["w0"]).square().mean()

    return loss_fn


def meta() -> None:
    """A model built on meta: each rank holds its own stages only, filled by load_state_dict."""
    full = llama.build(CONFIG, seed=0)
    with torch.device("meta"):
        model = llama.build(CONFIG, seed=0)
    pipeline = compiled(model)
    with pytest.raises(plait.PlaitError, match="load_state_dict"):
        pipeline.step(batch())
    pipeline.load_state_dict(full.state_dict())
    loss = float(pipeline.step(batch()))
    wanted, plain = reference()
    assert abs(loss - wanted) < 1e-5 * wanted, (loss, wanted)
    held = sum(p.numel() for p in pipeline.parameters())
    assert held < sum(p.numel() for p in plain.parameters())
    grads = dict(plain.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def partial_batch() -> None:
    """A rank may pass None for a leaf none of its stages reads; one it does read is an error on every rank."""
    pipeline = compiled(llama.build(CONFIG, seed=0))
    own = batch()
    if RANK == 0:
        own["targets"] = None
    else:
        own["tokens"] = None
    loss = float(pipeline.step(own))
    wanted, _ = reference()
    assert abs(loss - wanted) < 1e-5 * wanted
    own = batch()
    if RANK == 0:
        own["tokens"] = None
    with pytest.raises(plait.PlaitError, match="'tokens'" if RANK == 0 else "rank 0.*'tokens'"):
        pipeline.step(own)
    pipeline.step(batch())  # and the next step runs


def compile_error() -> None:
    """What one rank meets in compiling, every rank raises."""
    model = llama.build(CONFIG, seed=0)
    with pytest.raises(plait.PlaitError, match="zigzag"):
        compiled(model, schedule="zigzag" if RANK == 1 else "zb-h1")


def gone(when: str) -> None:
    """A rank that ends before or while it compiles is noticed by the other, which waits for it in compiling."""
    if RANK == 1 and when == "before":
        os._exit(3)

    def leave(request: Any) -> Any:
        if RANK == 1:
            os._exit(3)
        return build("1f1b", request.num_ranks, request.num_microbatches)

    register(Recipe("leaving", "", "0", "0", "", leave))
    started = time.monotonic()
    with pytest.raises(plait.PlaitError, match=r"another rank has ended.*rank 0 noticed"):
        compiled(llama.build(CONFIG, seed=0), "leaving")
    assert time.monotonic() - started < 20
    sys.stdout.write("noticed\n")
    sys.stdout.flush()
    os._exit(7)


def different() -> None:
    """Ranks that built different schedules, or for different hardware, learn it before the first message."""
    model = llama.build(CONFIG, seed=0)
    with pytest.raises(plait.PlaitError, match="another program or schedule"):
        compiled(model, schedule="gpipe" if RANK else "1f1b")
    with pytest.raises(plait.PlaitError, match=r"rank 0 has \"hardware='h100'\".*='a100'"):
        compiled(model, hardware="a100" if RANK else "h100")


def profile() -> None:
    """Times of all stages are known on every rank, and give a timeline."""
    pipeline = compiled(llama.build(CONFIG, seed=0))
    times = pipeline.profile(batch())
    assert len(times.f) == dist.get_world_size()  # type: ignore[arg-type]
    assert min(times.f) > 0  # type: ignore[type-var]
    assert pipeline.simulate().makespan > 0


def auto() -> None:
    """Profiling searches again: the same order on every rank, and the same results."""
    model = llama.build(CONFIG, seed=0)
    pipeline = compiled(model, "auto")
    loss, grads = pipeline.loss_and_grads(batch())
    pipeline.profile(batch())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, str(pipeline.schedule))
    assert everywhere == [everywhere[0]] * len(everywhere)
    again, same = pipeline.loss_and_grads(batch())
    assert torch.equal(loss, again)
    for name, grad in grads.items():
        assert (grad is None and same[name] is None) or torch.equal(grad, same[name]), name


def data_parallel() -> None:
    """Two replicas of two ranks, either axis first: loss, aux, gradients and their norm are the plain model's."""
    wanted_loss, plain = reference()
    wanted = dict(plain.named_parameters())
    norm = nn.utils.get_total_norm([p.grad for p in wanted.values() if p.grad is not None])

    def loss_fn(model: nn.Module, part: Any) -> Any:
        return llama.loss_fn(model, part), part["tokens"][:, 0]

    for mesh, schedule in (
        ({"stage": 2, "data": 2}, "zb-h1"),
        ({"data": 2, "stage": 2}, "dualpipev"),
    ):
        stages = 4 if schedule == "dualpipev" else 2
        pipeline = plait.compile(
            loss_fn,
            llama.build(CONFIG, seed=0),
            batch(),
            split=[f"layers.{i}" for i in CONFIG.cuts(stages)],
            schedule=schedule,
            num_microbatches=NUM_MICROBATCHES,
            mesh=mesh,
            has_aux=True,
            codegen="eager",
        )
        loss, aux = pipeline.step(batch())
        assert abs(float(loss) - wanted_loss) < 1e-6 * wanted_loss
        assert torch.equal(aux.flatten(), batch()["tokens"][:, 0])
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6, msg=name
            )
        torch.testing.assert_close(pipeline.clip_grad_norm_(1e9), norm, rtol=1e-5, atol=0)
        pipeline.profile(batch())
        assert pipeline.measure(batch()).makespan > 0
        place = dist.get_rank() // 2 if next(iter(mesh)) == "stage" else dist.get_rank() % 2
        assert all(pipeline.schedule.placement[s] == place for s in pipeline.engine.stages)


def measure() -> None:
    """Every rank returns when the actions of all ranks ran, by one clock: none before what it reads of another rank."""
    model = llama.build(CONFIG, seed=0)
    pipeline = compiled(model)
    timeline = pipeline.measure(batch())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (timeline.start.tolist(), timeline.end.tolist()))
    assert everywhere == [everywhere[0]] * len(everywhere)
    assert timeline.schedule == pipeline.schedule
    assert timeline.start.min() >= 0
    # What a B action sends leaves once its I has run, which no action's end tells.
    end = {
        task: one.end if one.action.kind.name in "FIW" else one.start
        for one in timeline.tasks
        for task in tasks_of(one.action)
    }
    for one in timeline.tasks:
        assert one.start < one.end
        assert all(end[task] <= one.start for task in awaited(one.action, pipeline.program))
    assert all(parameter.grad is None for parameter in model.parameters())


def clocks() -> None:
    """A rank on another host reads another clock; on the same host all read one."""
    device = torch.device("cpu")
    assert clock_offset(group(), device) == 0
    if RANK == 1:
        own = time.perf_counter
        time.perf_counter = lambda: own() + 100
    assert abs(clock_offset(group(), device) + 100 * (RANK == 1)) < 1


def aux() -> None:
    """Aux outputs, of whichever stage, come back on every rank, stacked by microbatch."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    own = {"x": torch.arange(12.0).reshape(4, 3)}

    def loss_fn(m: nn.Module, b: Any) -> Any:
        hidden = m[0](b["x"])
        out = m[1](hidden)
        return out.square().mean(), {"hidden": hidden.mean(), "out": out, "one": torch.ones(2)}

    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    pipeline = plait.compile(
        loss_fn, model, own, num_microbatches=2, split=["1"], codegen="eager", has_aux=True
    )
    _, got = pipeline.step(own)
    (_, same), _ = pipeline.loss_and_grads(own)
    parts = [loss_fn(model, {"x": own["x"][i : i + 2]})[1] for i in (0, 2)]
    for name in ("hidden", "out", "one"):
        wanted = torch.stack([part[name].detach() for part in parts])
        torch.testing.assert_close(got[name], wanted)
        torch.testing.assert_close(same[name], wanted)


def user_error() -> None:
    """An exception of the user's own loss on one rank is raised on all; the next compile works."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def loss_fn(m: nn.Module, b: Any) -> Any:
        if RANK == 1 and b is not None and fails:
            raise ZeroDivisionError("of the user")
        return m(b).sum()

    fails = True
    expected: Any = Exception if RANK == 1 else plait.PlaitError
    with pytest.raises(expected, match="of the user"):
        plait.compile(
            loss_fn, model, torch.ones(4, 3), num_microbatches=2, split=["1"], codegen="eager"
        )
    fails = False
    plait.compile(
        loss_fn, model, torch.ones(4, 3), num_microbatches=2, split=["1"], codegen="eager"
    )
    with pytest.raises(plait.PlaitError, match="unknown reduction"):
        compiled(llama.build(CONFIG), reduction="max" if RANK == 1 else "mean")
    with pytest.raises(plait.PlaitError, match="unknown hardware 'abacus'"):
        compiled(llama.build(CONFIG), hardware="abacus" if RANK == 1 else None)


def different_values() -> None:
    """Ranks that hold different values of a shared parameter learn it at compile time."""
    with pytest.raises(plait.PlaitError, match=r"'tok_embed\.weight' is shared.*different values"):
        compiled(llama.build(CONFIG, seed=RANK))


def failing(task: TaskKind, how: str) -> None:
    """R76: stage 1 fails on microbatch 2 of step 2; every rank ends, saying what failed first."""
    pipeline = compiled(llama.build(CONFIG, seed=0))
    plan = pipeline.engine._plan  # type: ignore[attr-defined]
    if RANK == 1:
        whole, calls = plan.tasks[1, task], itertools.count()

        def broken(operands: list[Any]) -> Any:
            if next(calls) < NUM_MICROBATCHES + 2:
                return whole(operands)
            if how == "raise":
                raise RuntimeError("out of luck")
            if how == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)

        plan.tasks[1, task] = broken
    pipeline.step(batch())
    started = time.monotonic()
    if how == "raise":
        first = rf"(rank 1 failed first, )?.*stage 1, microbatch 2, action 1[A-Z]2 .*task {task}.*out of luck"
    else:
        first = r"(rank \d failed first|another rank has ended).*stage \d, microbatch \d, action \d[A-Z_]+\d"
    with pytest.raises(plait.PlaitError, match=first) as caught:
        pipeline.step(batch())
    assert time.monotonic() - started < 20
    assert caught.value.__cause__ is not None
    print(caught.value)
    dist.destroy_process_group()
    sys.exit(7)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if sys.argv[1] == "failing":
        failing(cast(TaskKind, sys.argv[2]), sys.argv[3])
    runs: tuple[Any, ...] = (
        schedules,
        steps,
        meta,
        partial_batch,
        compile_error,
        gone,
        different,
        profile,
        auto,
        data_parallel,
        aux,
        user_error,
        different_values,
        measure,
        clocks,
    )
    {f.__name__: f for f in runs}[sys.argv[1]](*sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()
    print("done")
